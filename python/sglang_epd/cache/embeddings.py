"""Embeddings by key: pinned while in use, then evicted least recently used first; and layouts
by key.

A key names everything that an embedding depends on (`namespace.embedding_key`), so an entry
is never stale. Pinned entries stay, whatever their size. Idle entries are evicted as soon as
all entries together are over the capacity. With a capacity of 0, requests that want one
embedding at the same time still share it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from sglang_epd.wire.messages import Layout
from sglang_epd.wire.tensors import alone

logger = logging.getLogger(__name__)

MAX_ENTRIES = 65_536
# A long video's layout has thousands of timestamps.
MAX_BYTES = 64 << 20


@dataclass(eq=False)
class Entry:
    """An embedding [tokens, width] on the host, with its layout.

    Attributes:
        pins: how many use it; changed by the cache alone.
    """

    key: bytes
    layout: Layout
    embedding: torch.Tensor = field(repr=False)
    nbytes: int
    pins: int = 0


class EmbeddingCache:
    """A byte-bounded LRU cache with pins.

    Args:
        capacity_bytes: what idle and pinned entries may take together before idle ones
            are evicted; 0 keeps nothing that is idle.
        on_evict: called for each entry that is evicted for room.
    """

    def __init__(
        self, capacity_bytes: int, on_evict: Callable[[Entry], None] = lambda _entry: None
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes
        self._on_evict = on_evict
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()
        # Pinned, but not to be found any more: they were dropped while in use.
        self._dropped: set[Entry] = set()
        # Entries in each memory that is a batch's, by its address.
        self._sharers: Counter[int] = Counter()
        self._bytes = 0
        self._idle_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def nbytes(self) -> int:
        """All that is held, idle, pinned or dropped but still in use."""
        return self._bytes

    @property
    def pinned_bytes(self) -> int:
        return self._bytes - self._idle_bytes

    def find(self, key: bytes) -> Entry | None:
        """The entry of `key`, pinned once more; the caller releases it."""
        entry = self._entries.get(key)
        if entry is not None:
            self._pin(entry)
        return entry

    def add(self, key: bytes, layout: Layout, embedding: torch.Tensor) -> Entry:
        """Keep a new embedding; the entry is pinned once, and the caller releases it.

        Args:
            embedding: [tokens, width], on the host; it must not change any more.

        Raises:
            ValueError: the key is there already.
        """
        if key in self._entries:
            raise ValueError("an embedding of that key is there already")
        entry = Entry(key, layout, embedding, embedding.nbytes, pins=1)
        self._entries[key] = entry
        self._count(embedding, 1)
        self._make_room()
        return entry

    def release(self, entry: Entry) -> None:
        """Undo one pin.

        Raises:
            ValueError: it has none.
        """
        if entry.pins < 1:
            raise ValueError("released more often than pinned")
        entry.pins -= 1
        if entry.pins:
            return
        if entry in self._dropped:
            self._dropped.remove(entry)
            self._count(entry.embedding, -1)
            return
        if self.capacity_bytes:
            self.own(entry)
        self._idle[entry.key] = entry
        self._idle_bytes += entry.nbytes
        self._make_room()

    def own(self, entry: Entry) -> None:
        """Have a pinned entry lie in memory of its own, as what is kept for long has to.

        Where there is none, it stays where it is.
        """
        try:
            own = alone(entry.embedding)
        except RuntimeError as error:
            logger.warning("An embedding keeps the memory of its batch: %s", error)
            return
        self._count(entry.embedding, -1)
        entry.embedding = own
        self._count(own, 1)
        self._make_room()  # others may keep the memory that it lay in

    def clear(self) -> int:
        """Forget all entries, those in use as soon as they are idle; how many there were."""
        entries = list(self._entries.values())
        self._entries.clear()
        for entry in entries:
            if entry.pins:
                self._dropped.add(entry)
            else:
                self._forget_idle(entry)
        return len(entries)

    def _pin(self, entry: Entry) -> None:
        if not entry.pins:
            del self._idle[entry.key]
            self._idle_bytes -= entry.nbytes
        entry.pins += 1

    def _make_room(self) -> None:
        while self._idle and self._bytes > self.capacity_bytes:
            entry = next(iter(self._idle.values()))
            del self._entries[entry.key]
            self._forget_idle(entry)
            self._on_evict(entry)

    def _forget_idle(self, entry: Entry) -> None:
        del self._idle[entry.key]
        self._idle_bytes -= entry.nbytes
        self._count(entry.embedding, -1)

    def _count(self, embedding: torch.Tensor, change: int) -> None:
        """Count its memory, when an entry begins to keep it (1) or keeps it no more (-1)."""
        memory = embedding.untyped_storage()
        if memory.nbytes() > embedding.nbytes:
            address = memory.data_ptr()
            self._sharers[address] += change
            if self._sharers[address] > max(change, 0):
                return  # others keep it
            if change < 0:
                del self._sharers[address]
        self._bytes += change * memory.nbytes()


class LayoutCache:
    """Layouts by key, least recently used first to go, bounded in entries and in bytes (as
    they would be encoded).

    A key names all that a layout depends on but an encoder's settings of pixels: where encoders
    differ in these, the last one told stays.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Layout, int]] = OrderedDict()
        self._bytes = 0

    def find(self, key: bytes) -> Layout | None:
        """The layout of a key, which is now the last to go."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def drop(self, key: bytes) -> None:
        """Forget the layout of a key, if it is known."""
        if key in self._entries:
            self._bytes -= self._entries.pop(key)[1]

    def add(self, key: bytes, layout: Layout) -> None:
        """Remember a layout."""
        known = self.find(key)
        if known is not None:
            if known == layout:
                return
            self.drop(key)
        nbytes = len(key) + len(msgspec.msgpack.encode(layout))
        self._entries[key] = layout, nbytes
        self._bytes += nbytes
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
