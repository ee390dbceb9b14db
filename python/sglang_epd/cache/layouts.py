"""Layouts by key: the facts about an item that a prompt needs before its embedding is there.

A key names everything that a layout depends on, so an entry is never stale. They are
small, some hundred bytes an image, and are kept for as long as there is room.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from sglang_epd.wire.messages import Layout

MAX_ENTRIES = 65_536
# A long video's layout has thousands of timestamps.
MAX_BYTES = 64 << 20


class LayoutCache:
    """An LRU cache, bounded in entries and in bytes (as they would be encoded)."""

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[Layout, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._bytes

    def find(self, key: bytes) -> Layout | None:
        """The layout of a key, which is now the last to go."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def add(self, key: bytes, layout: Layout) -> None:
        """Remember a layout; the first of a key stays."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        nbytes = len(key) + len(msgspec.msgpack.encode(layout))
        self._entries[key] = layout, nbytes
        self._bytes += nbytes
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed
