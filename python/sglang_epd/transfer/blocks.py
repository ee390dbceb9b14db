"""Blocks: bytes of the arena with an owner, and their states.

    GRANTED --> FILLED --> HANDED <--> KEPT --> FREE
       |          |         ^|                    ^
       |          +---------|+--------------------|
       +--> QUARANTINED ----|---------------------|
       +--------------------+---------------------+

A block is granted to one encoder for one item, filled, and handed to the processes that
read it; when all of them have dropped it, it is free again, or kept for the next request
with the same item until its room is needed. The first rows of a block that is being filled may
be handed out before the others are there; should these not come, it is handed until its readers
have dropped them. A granted block is quarantined when
its grant is void while its encoder may still be writing to it (shared memory and Mooncake
write without asking). It is not reused before the encoder says that it is done, or is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from sglang_epd.transfer.extents import aligned
from sglang_epd.wire.messages import Offer


class BlockState(Enum):
    GRANTED = "granted"
    FILLED = "filled"
    HANDED = "handed"
    KEPT = "kept"
    QUARANTINED = "quarantined"
    FREE = "free"


_S = BlockState
TRANSITIONS: dict[BlockState, frozenset[BlockState]] = {
    _S.GRANTED: frozenset({_S.FILLED, _S.HANDED, _S.QUARANTINED, _S.FREE}),
    _S.FILLED: frozenset({_S.HANDED, _S.KEPT, _S.FREE}),
    _S.HANDED: frozenset({_S.KEPT, _S.FREE}),
    _S.KEPT: frozenset({_S.HANDED, _S.FREE}),
    _S.QUARANTINED: frozenset({_S.HANDED, _S.FREE}),
    _S.FREE: frozenset(),
}


@dataclass(eq=False)
class Block:
    """Bytes of the arena with an owner.

    Attributes:
        grant: its number, never used twice.
        slot: where its readers count.
        offer: of the embedding that it is for.
        expected: how often each reader will drop it.
        peer: the encoder's connection, if it may be asked about the grant.
        landing: the way the payload is to come: inline, shared or remote.
        until: when its grant, or its quarantine, ends.
        written: bytes that have come as frames.
        begun: bytes, whole rows, that may be handed out before the others are there.
        closed: the request that it was granted to will not hand it out again.
    """

    grant: int
    offset: int
    slot: int
    offer: Offer
    expected: np.ndarray
    peer: bytes | None = None
    landing: str = "inline"
    until: float = 0.0
    written: int = 0
    begun: int = 0
    state: BlockState = BlockState.GRANTED
    closed: bool = False

    @property
    def nbytes(self) -> int:
        return self.offer.nbytes

    @property
    def place(self) -> tuple[int, int]:
        """Where its memory begins and ends."""
        return self.offset, self.offset + aligned(self.nbytes)

    @property
    def name(self) -> tuple[str, int, int]:
        """Its grant's name in messages."""
        return self.offer.ticket, self.offer.item, self.grant

    @property
    def foreign(self) -> bool:
        """Whether a process other than the receiver writes to it."""
        return self.landing != "inline"

    def move(self, state: BlockState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"block cannot go from {self.state.value} to {state.value}")
        self.state = state
