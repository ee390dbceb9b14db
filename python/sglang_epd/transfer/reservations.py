"""The receive budget: which bytes of the arena are granted, kept or free (`blocks`).

An embedding may be found by its key from the moment it has arrived. It is pinned while
requests hold it or processes read it; then it is kept until it is used again, or its room is
needed. The least recently used goes first. Synchronous and without a clock, a socket or memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.extents import Extents, aligned
from sglang_epd.wire.messages import Offer

_S = BlockState
# A frozen encoder of another machine may go on with a write when it thaws; nothing tells
# whether it will. After this long its connection is taken for dead.
QUARANTINE_S = 300.0
# What a process sent before its end may stand in this machine's sockets, and be written later.
IN_SOCKETS_S = 5.0


class Reservations:
    """Blocks of one arena.

    Args:
        size: bytes of payload that the arena holds.
        slots: blocks that may exist at a time.
        readers: processes that read.
        drops: slots [n] to how often each reader has dropped each: [n, readers].
        reset: prepares a slot for its next use.
        writer_lives: whether a process runs; None where that cannot be seen.
        kept_bytes: bytes of idle blocks that may be kept until their room is needed; with 0
            no embedding is found by its key.

    Attributes:
        extents: which bytes are taken.
        kept_bytes: bytes of idle blocks, kept for the next request.
        freed: grows whenever something may be taken: offers that wait are worth another look.
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
        self.extents = Extents(size)
        self._slots = list(range(slots - 1, -1, -1))
        self._readers = readers
        self._drops = drops
        self._reset = reset
        self._writer_lives = writer_lives
        self._most_kept_bytes = kept_bytes
        # By number of grant; those that are kept, least recently used first.
        self._blocks: dict[BlockState, dict[int, Block]] = {state: {} for state in _S}
        # Those that other requests may find.
        self._by_key: dict[bytes, Block] = {}
        self._next_grant = 1
        self._on_evict: Callable[[bytes], None] | None = None
        self.kept_bytes = 0
        self.freed = 0

    def listen(self, on_evict: Callable[[bytes], None]) -> None:
        """Have the key of each evicted block told to the one ledger of these books."""
        assert self._on_evict is None, "these books have a ledger"
        self._on_evict = on_evict

    @property
    def held_bytes(self) -> int:
        """Bytes that are granted, filled or read."""
        return self.extents.taken_bytes - self.kept_bytes

    def __len__(self) -> int:
        """Blocks that are in use."""
        return sum(len(some) for state, some in self._blocks.items() if state is not _S.KEPT)

    @property
    def quarantined(self) -> list[Block]:
        """Blocks without a use that an encoder may still be writing to."""
        return list(self._blocks[_S.QUARANTINED].values())

    def grant(
        self, offer: Offer, *, high: bool = False, within: tuple[int, int] | None = None
    ) -> Block | None:
        """Reserve a block; None if there is no room now.

        Kept blocks are evicted for it, least recently used first.

        Args:
            offer: of the payload.
            high, within: as `Extents.take` has them.
        """
        offset = self._take(offer.nbytes, high, within)
        if offset is None:
            return None
        slot = self._slots.pop()
        self._reset(slot)
        expected = np.zeros(self._readers, np.uint32)
        block = Block(self._next_grant, offset, slot, offer, expected)
        self._next_grant += 1
        self._blocks[block.state][block.grant] = block
        return block

    def _take(self, nbytes: int, high: bool, within: tuple[int, int] | None) -> int | None:
        if self._slots:
            offset = self.extents.take(nbytes, high=high, within=within)
            if offset is not None:
                return offset
        begin, end = within or (0, self.extents.size)
        if not self._fits(aligned(nbytes), begin, end):
            return None  # those that are kept would be evicted for nothing
        while (victim := self._victim(begin, end)) is not None:
            self._evict(victim)
            offset = self.extents.take(nbytes, high=high, within=within)
            if offset is not None:
                return offset
        return None

    def _fits(self, nbytes: int, begin: int, end: int) -> bool:
        """Whether there would be room in [begin, end) if nothing were kept."""
        used = sorted(
            (block.offset, block.offset + aligned(block.nbytes))
            for state, some in self._blocks.items()
            if state is not _S.KEPT
            for block in some.values()
        )
        for first, last in used:
            if min(first, end) - begin >= nbytes:
                return True
            begin = max(begin, last)
        return end - begin >= nbytes

    def _victim(self, begin: int, end: int) -> Block | None:
        """The block to evict first for room in [begin, end)."""
        for block in self._blocks[_S.KEPT].values():
            if block.offset < end and begin < block.offset + aligned(block.nbytes):
                return block
        return None

    def find(self, key: bytes) -> Block | None:
        """A block with the embedding of that key, used or kept; it is now the last to go."""
        block = self._by_key.get(key)
        if block is not None and block.state is _S.KEPT:
            kept = self._blocks[_S.KEPT]
            kept[block.grant] = kept.pop(block.grant)
        return block

    def revoke(self, block: Block, now: float) -> None:
        """Void the grant; the block is free as soon as no process can be writing to it.

        Args:
            now: seconds, of the clock of `reclaim`.
        """
        if not block.foreign:
            self.give_up(block)
            return
        self._move(block, _S.QUARANTINED)
        block.until = now + QUARANTINE_S

    def settle_late(self, grant: int, ticket: str) -> None:
        """Free a revoked grant's block, as its encoder has ended; does nothing for another's grant.

        Args:
            grant: its number, which a stranger could guess.
            ticket: of its request, which a stranger could not.
        """
        block = self._blocks[_S.QUARANTINED].get(grant)
        if block is not None and block.offer.ticket == ticket:
            self.give_up(block)

    def fill(self, block: Block, *, findable: bool = True) -> bool:
        """Note that all of the payload is there.

        Args:
            findable: whether other requests may find it by its key.

        Returns:
            Whether it is this block that its key leads to.
        """
        self._move(block, _S.FILLED)
        if block.expected.any():
            self._move(block, _S.HANDED)
        fits = aligned(block.nbytes) <= self._most_kept_bytes
        if not (findable and fits) or block.offer.key in self._by_key:
            return False
        self._by_key[block.offer.key] = block
        return True

    def hand(self, block: Block, first_reader: int, readers: int) -> None:
        """Hand the block, or what has come of it, to some processes; each will drop it once.

        Args:
            first_reader, readers: the numbers of the processes: so many, from the first.
        """
        if block.state not in (_S.HANDED, _S.GRANTED):
            self._move(block, _S.HANDED)
        block.expected[first_reader : first_reader + readers] += 1

    def close(self, block: Block) -> None:
        """Note that the request that it was granted to will not hand it out again."""
        block.closed = True
        if block.state is not _S.HANDED:
            self._retire(block)

    def give_up(self, block: Block) -> None:
        """Free a block that will not be filled, once nothing reads the rows that had come."""
        if not block.expected.any():
            self.free(block)
            return
        self._move(block, _S.HANDED)
        block.closed = True

    def free(self, block: Block) -> None:
        """Give the bytes and the slot back."""
        self._move(block, _S.FREE)
        if self._findable(block):
            del self._by_key[block.offer.key]
        self.extents.give(block.offset)
        self._slots.append(block.slot)
        self.freed += 1

    def _move(self, block: Block, state: BlockState) -> None:
        before = block.state
        block.move(state)
        del self._blocks[before][block.grant]
        if state is not _S.FREE:
            self._blocks[state][block.grant] = block
        self.kept_bytes += aligned(block.nbytes) * ((state is _S.KEPT) - (before is _S.KEPT))

    def _findable(self, block: Block) -> bool:
        return self._by_key.get(block.offer.key) is block

    def _retire(self, block: Block) -> None:
        """Keep or free a block that has become idle."""
        if not self._findable(block):
            self.free(block)
            return
        self._move(block, _S.KEPT)
        self.freed += 1
        while self.kept_bytes > self._most_kept_bytes:
            self._evict(next(iter(self._blocks[_S.KEPT].values())))

    def _evict(self, block: Block) -> None:
        self.free(block)
        if self._on_evict is not None:
            self._on_evict(block.offer.key)

    def reclaim(self, now: float) -> None:
        """End quarantines that are over, and free or keep blocks that every reader has dropped.

        Args:
            now: in seconds of the ledger's clock.
        """
        # A frozen encoder may have hundreds of blocks.
        writer_lives = cache(self._writer_lives)
        for block in self.quarantined:
            writer = block.offer.process
            lives = writer_lives(writer) if writer else None
            if lives:
                block.until = max(block.until, now + IN_SOCKETS_S)
            elif lives is False:
                linger = IN_SOCKETS_S if block.landing == "remote" else 0.0
                block.until = min(block.until, now + linger)
            if not lives and now >= block.until:
                self.give_up(block)
        closed = [block for block in self._blocks[_S.HANDED].values() if block.closed]
        if closed:
            drops = self._drops(np.array([block.slot for block in closed]))
            expected = np.stack([block.expected for block in closed])
            done = (drops == expected).all(axis=1)
            for block in (block for block, is_done in zip(closed, done, strict=True) if is_done):
                self._retire(block)
