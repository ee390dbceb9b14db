"""The receive budget: which bytes of the arena are granted, and to which request (`blocks`).

Synchronous and without a clock, a socket or memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.extents import Extents, aligned
from sglang_epd.transfer.kept import Kept
from sglang_epd.wire.messages import Layout

_S = BlockState
# A frozen encoder of another machine may go on with a write when it thaws; nothing tells
# whether it will. After this long its connection is taken for dead.
QUARANTINE_S = 300.0


class Reservations:
    """Blocks of one arena.

    Args:
        size: bytes of payload that the arena holds.
        slots: blocks that may exist at a time.
        readers: processes that read.
        drops: slots [n] to how often each reader has dropped each: [n, readers].
        reset: prepares a slot for its next use.
        writer_lives: whether a process runs; None where that cannot be seen.
        kept_bytes: bytes of idle blocks that may be kept until their room is needed.
    """

    def __init__(
        self,
        size: int,
        slots: int,
        readers: int,
        *,
        drops: Callable[[np.ndarray], np.ndarray],
        reset: Callable[[int], None],
        writer_lives: Callable[[str], bool | None],
        kept_bytes: int = 0,
    ) -> None:
        self._extents = Extents(size)
        self._slots = list(range(slots - 1, -1, -1))
        self._readers = readers
        self._drops = drops
        self._reset = reset
        self._writer_lives = writer_lives
        self._blocks: dict[int, Block] = {}
        self._quarantined: dict[int, Block] = {}
        self._handed: dict[int, Block] = {}
        self._next_grant = 1
        self._kept = Kept(kept_bytes)
        # Called with the key of each evicted block.
        self.on_evict: Callable[[bytes], None] = lambda _key: None
        # Grows whenever something may be taken: offers that wait are worth another look.
        self.freed = 0

    @property
    def size(self) -> int:
        """Bytes of payload that fit at most."""
        return self._extents.size

    @property
    def held_bytes(self) -> int:
        """Bytes that are granted, filled or read."""
        return self._extents.taken_bytes - self._kept.resting_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of idle blocks, kept for the next request."""
        return self._kept.resting_bytes

    @property
    def free_ranges(self) -> list[tuple[int, int]]:
        """Where nothing lies, as [begin, end)."""
        return self._extents.free_ranges

    def __len__(self) -> int:
        """Blocks that are in use."""
        return len(self._blocks) - self._kept.resting

    @property
    def quarantined(self) -> int:
        """Blocks without a use that an encoder may still be writing to."""
        return len(self._quarantined)

    @property
    def in_doubt(self) -> list[Block]:
        """Those of them whose encoder can be asked."""
        return [block for block in self._quarantined.values() if block.peer is not None]

    def grant(
        self, nbytes: int, *, high: bool = False, within: tuple[int, int] | None = None
    ) -> Block | None:
        """Reserve a block; None if there is no room now.

        Kept blocks are evicted for it, least recently used first.

        Args:
            nbytes: of the payload.
            high, within: as `Extents.take` has them.
        """
        offset = self._take(nbytes, high, within)
        if offset is None:
            return None
        slot = self._slots.pop()
        self._reset(slot)
        block = Block(
            self._next_grant, offset, nbytes, slot, expected=np.zeros(self._readers, np.uint32)
        )
        self._next_grant += 1
        self._blocks[block.grant] = block
        return block

    def _take(self, nbytes: int, high: bool, within: tuple[int, int] | None) -> int | None:
        if self._slots:
            offset = self._extents.take(nbytes, high=high, within=within)
            if offset is not None:
                return offset
        if aligned(nbytes) > self.size - self.held_bytes:
            return None
        place = within or (0, self.size)
        while (victim := self._kept.victim(*place)) is not None:
            self._evict(victim)
            offset = self._extents.take(nbytes, high=high, within=within)
            if offset is not None:
                return offset
        return None

    def find(self, key: bytes) -> Block | None:
        """A block with the embedding of that key, whether it is used or not."""
        return self._kept.find(key)

    def revoke(self, block: Block, now: float) -> None:
        """Void the grant; the block is free as soon as no process can be writing to it.

        Args:
            now: seconds, of the clock of `reclaim`.
        """
        if not block.foreign:
            self.free(block)
            return
        block.move(_S.QUARANTINED)
        block.until = now + QUARANTINE_S
        self._quarantined[block.grant] = block

    def settle_late(self, grant: int, ticket: str) -> None:
        """Free a revoked grant's block, as its encoder has ended; does nothing for another's grant.

        Args:
            grant: its number, which a stranger could guess.
            ticket: of its request, which a stranger could not.
        """
        block = self._quarantined.get(grant)
        # Numbers of grants can be guessed, tickets cannot.
        if block is not None and block.ticket == ticket:
            self.free(block)

    def fill(self, block: Block, key: bytes = b"", layout: Layout | None = None) -> bool:
        """Note that all of the payload is there, and let it be found by its key.

        Args:
            key: of the embedding; empty if no other request may find it.
            layout: of the embedding.

        Returns:
            Whether it is this block that the key leads to.
        """
        block.move(_S.FILLED)
        block.key, block.layout = key, layout
        return self._kept.add(block)

    def hand(self, block: Block, first_reader: int, readers: int) -> None:
        """Hand the block to some processes; each will drop it once.

        Args:
            first_reader, readers: the numbers of the processes: so many, from the first.
        """
        if block.state is _S.KEPT:
            self._kept.use(block)
        if block.state is not _S.HANDED:
            block.move(_S.HANDED)
            self._handed[block.grant] = block
        block.expected[first_reader : first_reader + readers] += 1

    def close(self, block: Block) -> None:
        """Note that the request that it was granted to will not hand it out again."""
        block.closed = True
        if block.state is not _S.HANDED:
            self._retire(block)

    def free(self, block: Block) -> None:
        """Give the bytes and the slot back."""
        block.move(_S.FREE)
        self._quarantined.pop(block.grant, None)
        self._handed.pop(block.grant, None)
        self._kept.forget(block)
        del self._blocks[block.grant]
        self._extents.give(block.offset)
        self._slots.append(block.slot)
        self.freed += 1

    def _retire(self, block: Block) -> None:
        """Keep or free a block that has become idle."""
        if not self._kept.holds(block):
            self.free(block)
            return
        block.move(_S.KEPT)
        self._handed.pop(block.grant, None)
        self._kept.rest(block)
        self.freed += 1
        for victim in self._kept.over():
            self._evict(victim)

    def _evict(self, block: Block) -> None:
        self.free(block)
        self.on_evict(block.key)

    def reclaim(self, now: float) -> None:
        """Free or keep blocks that every reader has dropped, and end quarantines that are over."""
        closed = [block for block in self._handed.values() if block.closed]
        if closed:
            drops = self._drops(np.array([block.slot for block in closed]))
            expected = np.stack([block.expected for block in closed])
            done = (drops == expected).all(axis=1)
            for block in (block for block, is_done in zip(closed, done, strict=True) if is_done):
                self._retire(block)
        for block in list(self._quarantined.values()):
            lives = self._writer_lives(block.writer) if block.writer else None
            if lives is False or (now >= block.until and not lives):
                self.free(block)

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not add up."""
        self._extents.check_integrity()
        self._kept.check_integrity()
        taken = sum(aligned(block.nbytes) for block in self._blocks.values())
        assert self.held_bytes + self.kept_bytes == taken
        slots = [block.slot for block in self._blocks.values()]
        assert len(set(slots)) == len(slots), "two blocks share a slot"
        assert not set(slots) & set(self._slots), "a slot is both used and free"
        for grant, block in self._blocks.items():
            assert block.grant == grant
            assert block.state is not _S.FREE, "a free block is kept"
            assert (block.state is _S.QUARANTINED) == (grant in self._quarantined)
            assert (block.state is _S.HANDED) == (grant in self._handed)
        kept = [block for block in self._blocks.values() if block.state is _S.KEPT]
        assert len(kept) == self._kept.resting
        assert all(self._kept.holds(block) and block.closed for block in kept)
