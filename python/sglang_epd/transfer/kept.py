"""Idle embeddings in the arena, by key, for requests that bring the same item again.

An embedding may be found from the moment it has arrived. It is pinned while requests hold
it or processes read it; then it is kept until it is used again, or its room is needed. The
least recently used goes first.

Plain data: knows blocks, no memory, clock or socket. Whose a block is, and when it is
free, is decided by `reservations`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sglang_epd.transfer.blocks import Block
from sglang_epd.transfer.extents import aligned


class Kept:
    """An index of blocks by key, and the order in which those at rest go.

    Args:
        capacity_bytes: bytes of idle blocks; 0 keeps nothing, and nothing is found.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        self.capacity_bytes = capacity_bytes
        self._by_key: dict[bytes, Block] = {}
        self._resting: OrderedDict[bytes, Block] = OrderedDict()
        self._resting_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def resting(self) -> int:
        """Idle blocks."""
        return len(self._resting)

    @property
    def resting_bytes(self) -> int:
        """Bytes of idle blocks."""
        return self._resting_bytes

    def find(self, key: bytes) -> Block | None:
        """The block of a key, which is now the last to go."""
        block = self._by_key.get(key)
        if key in self._resting:
            self._resting.move_to_end(key)
        return block

    def add(self, block: Block) -> bool:
        """Let a block be found by its key; False if another is, or it is too large to rest."""
        fits = aligned(block.nbytes) <= self.capacity_bytes
        if not block.key or not fits or block.key in self._by_key:
            return False
        self._by_key[block.key] = block
        return True

    def holds(self, block: Block) -> bool:
        """Whether it is this block that its key leads to."""
        return self._by_key.get(block.key) is block

    def rest(self, block: Block) -> None:
        """Keep a block that has become idle."""
        assert self.holds(block) and block.key not in self._resting
        self._resting[block.key] = block
        self._resting_bytes += aligned(block.nbytes)

    def use(self, block: Block) -> None:
        """It is used again."""
        del self._resting[block.key]
        self._resting_bytes -= aligned(block.nbytes)

    def forget(self, block: Block) -> bool:
        """It is not to be found any more; False if it was not."""
        if not self.holds(block):
            return False
        if block.key in self._resting:
            self.use(block)
        del self._by_key[block.key]
        return True

    def over(self) -> Iterator[Block]:
        """Blocks to evict for the capacity; forget each before the next is asked for."""
        while self._resting_bytes > self.capacity_bytes:
            yield next(iter(self._resting.values()))

    def victim(self, begin: int, end: int) -> Block | None:
        """The block to evict first for room in [begin, end) of the arena."""
        resting = self._resting.values()
        return next((block for block in resting if _overlaps(block, begin, end)), None)

    def check_integrity(self) -> None:
        """Raise AssertionError where the bookkeeping contradicts itself."""
        assert self._resting_bytes == sum(aligned(b.nbytes) for b in self._resting.values())
        assert self._resting_bytes <= self.capacity_bytes
        assert self._resting.keys() <= self._by_key.keys()
        assert all(key and key == block.key for key, block in self._by_key.items())
        assert all(self._by_key[key] is block for key, block in self._resting.items())


def _overlaps(block: Block, begin: int, end: int) -> bool:
    return block.offset < end and begin < block.offset + aligned(block.nbytes)
