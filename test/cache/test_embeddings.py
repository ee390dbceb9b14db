from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_epd.cache import EmbeddingCache, LayoutCache
from sglang_epd.cache.embeddings import Entry
from sglang_epd.wire.messages import Layout, TensorSpec

WIDTH_BYTES = 16


def embedding(rows: int, beside: int = 0) -> torch.Tensor:
    """Rows in a memory with so many of others."""
    return torch.zeros(rows + beside, WIDTH_BYTES // 4)[:rows]


def layout(rows: int, times: int = 0) -> Layout:
    spec = TensorSpec("float32", (rows, WIDTH_BYTES // 4))
    extra = {"video_timestamps": [[float(n) for n in range(times)]]} if times else {}
    return Layout("IMAGE", spec, [[1, 2, 2 * rows]], extra)


def add(cache: EmbeddingCache, key: bytes, rows: int = 1, beside: int = 0) -> Entry:
    return cache.add(key, layout(rows), embedding(rows, beside))


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
    cache.check_integrity()


def test_uses_count_those_who_were_given_it(cache):
    entry = add(cache, b"a")
    assert entry.uses == 0, "whoever made it does not use it"
    for _ in range(3):
        cache.release(cache.find(b"a"))
    assert entry.uses == 3


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
        # Of the memory that each keeps, and those of its own.
        self.rows: dict[Entry, int] = {}
        self.own_rows: dict[Entry, int] = {}
        # One for each pin.
        self.pinned: list[Entry] = []
        self.idle: list[Entry] = []
        self.found: dict[bytes, Entry] = {}

    def make_room(self) -> None:
        expected = []
        while self.idle and sum(self.rows[e] for e in self.held) > CAPACITY_ROWS:
            gone = self.idle.pop(0)
            del self.found[gone.key]
            expected.append(gone.key)
        assert self.evicted == expected
        self.evicted.clear()

    @property
    def held(self) -> set[Entry]:
        return {*self.pinned, *self.idle}

    @rule(
        key=st.sampled_from(KEYS), rows=st.integers(0, CAPACITY_ROWS + 1), beside=st.integers(0, 3)
    )
    def add(self, key, rows, beside):
        if key in self.found:
            with pytest.raises(ValueError, match="there already"):
                add(self.cache, key, rows)
            return
        entry = self.found[key] = add(self.cache, key, rows, beside)
        self.rows[entry], self.own_rows[entry] = rows + beside, rows
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
            self.rows[entry] = self.own_rows[entry]
            self.make_room()

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0))
    def own(self, index):
        entry = self.pinned[index % len(self.pinned)]
        self.cache.own(entry)
        self.rows[entry] = self.own_rows[entry]

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key):
        entry = self.found.pop(key, None)
        assert self.cache.drop(key) == (entry is not None)
        if entry in self.idle:
            self.idle.remove(entry)

    @rule()
    def clear(self):
        assert self.cache.clear() == len(self.found)
        self.found.clear()
        self.idle.clear()

    @invariant()
    def the_books_add_up(self):
        self.cache.check_integrity()
        assert not self.evicted
        assert len(self.cache) == len(self.found)
        assert self.cache.nbytes == WIDTH_BYTES * sum(self.rows[e] for e in self.held)
        pinned = {*self.pinned}
        assert self.cache.pinned_bytes == WIDTH_BYTES * sum(self.rows[e] for e in pinned)
        *_, last = [None, *self.cache.entries()]
        assert not self.idle or last is self.idle[-1]
        assert {*self.cache.entries()} == {*self.found.values()}
        for entry in self.held:
            kept = entry.embedding.untyped_storage().nbytes()
            assert entry.nbytes == kept == WIDTH_BYTES * self.rows[entry]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=40)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_was_added_is_found_and_the_first_stays():
    cache = LayoutCache()
    cache.add(key(1), layout(3))
    cache.add(key(1), layout(4))
    assert cache.find(key(1)) == layout(3)
    assert cache.find(key(2)) is None
    assert len(cache) == 1


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
        assert cache.nbytes <= bound
    assert 0 < len(cache) < count
    assert cache.find(key(count - 1)) is not None


def test_one_that_is_too_large_is_not_kept():
    cache = LayoutCache(max_bytes=1000)
    cache.add(key(0), layout(1, 10_000))
    assert (len(cache), cache.nbytes) == (0, 0)
