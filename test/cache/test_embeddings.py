from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from integrity import check_cache
from sglang_epd.cache import EmbeddingCache, LayoutCache, embeddings
from sglang_epd.cache.embeddings import Entry
from sglang_epd.wire.messages import Layout, TensorSpec

WIDTH_BYTES = 16


def embedding(rows: int) -> torch.Tensor:
    return torch.zeros(rows, WIDTH_BYTES // 4)


def layout(rows: int, times: int = 0) -> Layout:
    spec = TensorSpec("float32", (rows, WIDTH_BYTES // 4))
    extra = {"video_timestamps": [[float(n) for n in range(times)]]} if times else {}
    return Layout("IMAGE", spec, [[1, 2, 2 * rows]], extra)


def add(cache: EmbeddingCache, key: bytes, rows: int = 1) -> Entry:
    return cache.add(key, layout(rows), embedding(rows))


@pytest.fixture
def evicted() -> list[bytes]:
    return []


@pytest.fixture
def cache(evicted) -> EmbeddingCache:
    """There is room for three rows."""
    return EmbeddingCache(3 * WIDTH_BYTES, lambda entry: evicted.append(entry.key))


def test_what_was_added_is_found(cache):
    tensor = embedding(2)
    entry = cache.add(b"a", layout(2), tensor)
    cache.release(entry)
    found = cache.find(b"a")
    assert found is entry
    assert found.embedding is tensor
    assert (found.layout, found.nbytes, found.pins) == (layout(2), 2 * WIDTH_BYTES, 1)
    assert cache.find(b"b") is None


def test_without_capacity_only_those_who_want_it_together_share(evicted):
    cache = EmbeddingCache(0)
    entry = add(cache, b"a")
    assert cache.find(b"a") is entry
    cache.release(entry)
    assert b"a" in cache
    cache.release(entry)
    assert b"a" not in cache
    assert cache.nbytes == 0


def test_more_releases_than_pins_are_an_error(cache):
    entry = add(cache, b"a")
    cache.release(entry)
    with pytest.raises(ValueError, match="more often"):
        cache.release(entry)
    check_cache(cache)


def test_memory_of_its_own_makes_others_leave(cache, evicted):
    """The memory that it shared stays for the other."""
    cache.release(add(cache, b"idle"))
    batch = embedding(2)
    mine, _other = (
        cache.add(key, layout(1), batch[n : n + 1]) for n, key in enumerate((b"a", b"b"))
    )
    assert not evicted
    cache.own(mine)
    assert evicted == [b"idle"]
    check_cache(cache)


def test_where_there_is_no_memory_for_its_own_it_stays_where_it_is(cache, monkeypatch):
    def full(_tensor):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(embeddings, "alone", full)
    batch = embedding(2)
    entry = cache.add(b"a", layout(1), batch[:1])
    cache.own(entry)
    cache.release(entry)
    check_cache(cache)
    assert cache.find(b"a") is entry
    cache.release(entry)
    assert cache.clear() == 1
    check_cache(cache)


def test_a_capacity_is_not_negative():
    with pytest.raises(ValueError, match="negative"):
        EmbeddingCache(-1)


KEYS = [bytes([n]) for n in range(6)]
CAPACITY_ROWS = 5


class CacheMachine(RuleBasedStateMachine):
    """Random use, beside a list of what is there in the order of its last use."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.cache = EmbeddingCache(
            CAPACITY_ROWS * WIDTH_BYTES, lambda entry: self.evicted.append(entry.key)
        )
        self.rows: dict[Entry, int] = {}
        # That each keeps, with its rows: its own, named by the entry, or its batch's.
        self.memory: dict[Entry, tuple[object, int]] = {}
        self.batches: list[torch.Tensor | None] = []  # so that no other has their name
        # One for each pin.
        self.pinned: list[Entry] = []
        self.idle: list[Entry] = []
        self.found: dict[bytes, Entry] = {}

    def make_room(self) -> None:
        expected = []
        while self.idle and self.kept_rows(self.held) > CAPACITY_ROWS:
            gone = self.idle.pop(0)
            del self.found[gone.key]
            expected.append(gone.key)
        assert self.evicted == expected
        self.evicted.clear()

    @property
    def held(self) -> set[Entry]:
        return {*self.pinned, *self.idle}

    def kept_rows(self, entries: set[Entry]) -> int:
        return sum(dict(self.memory[entry] for entry in entries).values())

    @rule(key=st.sampled_from(KEYS), rows=st.integers(0, CAPACITY_ROWS + 1))
    def add(self, key, rows):
        if key in self.found:
            with pytest.raises(ValueError, match="there already"):
                add(self.cache, key, rows)
            return
        self.added(add(self.cache, key, rows), None)

    @rule(sizes=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3), min_size=2, max_size=3))
    def add_batch(self, sizes):
        """What is there already leaves its rows unused."""
        whole = embedding(sum(sizes.values()))
        for (key, rows), part in zip(sizes.items(), whole.split([*sizes.values()]), strict=True):
            if key not in self.found:
                self.added(self.cache.add(key, layout(rows), part), whole)

    def added(self, entry: Entry, batch: torch.Tensor | None) -> None:
        rows = self.rows[entry] = len(entry.embedding)
        self.memory[entry] = (entry, rows) if batch is None else (id(batch), len(batch))
        self.batches.append(batch)
        self.found[entry.key] = entry
        self.pinned.append(entry)
        self.make_room()

    @rule(key=st.sampled_from(KEYS))
    def find(self, key):
        entry = self.cache.find(key)
        assert entry is self.found.get(key)
        if entry is not None:
            self.pinned.append(entry)
            if entry in self.idle:
                self.idle.remove(entry)

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0))
    def release(self, index):
        entry = self.pinned.pop(index % len(self.pinned))
        self.cache.release(entry)
        if entry not in self.pinned and self.found.get(entry.key) is entry:
            self.idle.append(entry)
            self.memory[entry] = entry, self.rows[entry]
            self.make_room()

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0))
    def own(self, index):
        entry = self.pinned[index % len(self.pinned)]
        self.cache.own(entry)
        self.memory[entry] = entry, self.rows[entry]
        self.make_room()

    @rule()
    def clear(self):
        assert self.cache.clear() == len(self.found)
        self.found.clear()
        self.idle.clear()

    @invariant()
    def the_books_add_up(self):
        check_cache(self.cache)
        assert not self.evicted
        assert len(self.cache) == len(self.found)
        assert self.cache.nbytes == WIDTH_BYTES * self.kept_rows(self.held)
        assert self.cache.pinned_bytes == WIDTH_BYTES * self.kept_rows({*self.pinned})
        for entry in self.held:
            kept = entry.embedding.untyped_storage().nbytes()
            assert kept == WIDTH_BYTES * self.memory[entry][1]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=40)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_was_added_last_is_found():
    """Of encoders with other settings of pixels: what one told would stay wrong for good."""
    cache, one = LayoutCache(), LayoutCache()
    cache.add(key(1), layout(3))
    cache.add(key(1), layout(400))
    assert cache.find(key(1)) == layout(400)
    assert cache.find(key(2)) is None
    one.add(key(1), layout(400))
    assert (len(cache._entries), cache._bytes) == (1, one._bytes)


def test_the_least_recently_used_goes_first():
    cache = LayoutCache(max_entries=3)
    for number in range(3):
        cache.add(key(number), layout(1))
    cache.find(key(0))
    cache.add(key(1), layout(1))
    cache.add(key(3), layout(1))
    assert [n for n in range(4) if cache.find(key(n))] == [0, 1, 3]


@pytest.mark.parametrize(("times", "count"), [(0, 3000), (10_000, 60)])
def test_its_bytes_are_bounded(times, count):
    bound = 200_000
    cache = LayoutCache(max_bytes=bound)
    for number in range(count):
        cache.add(key(number), layout(1, times))
        assert cache._bytes <= bound
    assert 0 < len(cache._entries) < count
    assert cache.find(key(count - 1)) is not None


def test_one_that_is_too_large_is_not_kept():
    cache = LayoutCache(max_bytes=1000)
    cache.add(key(0), layout(1, 10_000))
    assert (len(cache._entries), cache._bytes) == (0, 0)
