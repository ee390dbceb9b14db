"""A receiver's record of a request: its items and its claim. Plain data; `ledger` decides."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from sglang_epd.errors import EpdError
from sglang_epd.transfer.blocks import Block
from sglang_epd.wire import messages as wire


class ItemState(Enum):
    PLANNED = "planned"
    GRANTED = "granted"
    RECEIVED = "received"
    CACHED = "cached"
    # With its request; `RequestEntry.error` says why.
    ENDED = "ended"


_S = ItemState
# A second grant replaces the first when an item is dispatched again because its encoder
# froze or died after the offer; the first encoder's late payload names the old grant and
# is dropped. A grant that expires, or that its encoder withdraws, leaves the item as if
# never offered. A cached item may lose its embedding to a grant before it is used.
TRANSITIONS: dict[ItemState, frozenset[ItemState]] = {
    _S.PLANNED: frozenset({_S.GRANTED, _S.CACHED, _S.ENDED}),
    _S.GRANTED: frozenset({_S.PLANNED, _S.GRANTED, _S.RECEIVED, _S.ENDED}),
    _S.RECEIVED: frozenset({_S.ENDED}),
    _S.CACHED: frozenset({_S.PLANNED, _S.ENDED}),
    _S.ENDED: frozenset(),
}


class Plan(Enum):
    """How far it is known which items a request needs."""

    # None yet: its layouts are known, and its first claim will say what its prefix cache has.
    UNDECIDED = "undecided"
    # All of them, as far as is known.
    OPEN = "open"
    # An item was here before, and waits until the layouts of all items are known.
    GATHERING = "gathering"
    # Its claimant looks into its prefix cache, and will claim again; the item waits for that.
    ASKING = "asking"
    DECIDED = "decided"


PLANS: dict[Plan, frozenset[Plan]] = {
    Plan.UNDECIDED: frozenset({Plan.DECIDED}),
    Plan.OPEN: frozenset({Plan.GATHERING}),
    Plan.GATHERING: frozenset({Plan.ASKING, Plan.DECIDED}),
    Plan.ASKING: frozenset({Plan.DECIDED}),
    Plan.DECIDED: frozenset(),
}

# Names a claim: the connection that it came over, and its name there.
Claimant = tuple[bytes, str]


@dataclass
class Item:
    # Empty where it is unknown.
    key: bytes = b""
    state: ItemState = ItemState.PLANNED
    # Of an item that was granted or received; a cached item holds no block.
    block: Block | None = None
    # From the encoder's offer.
    laid: tuple[bytes, wire.Layout] | None = None
    # Whether the tokenizer has been asked to have it encoded.
    asked: bool = False
    # The grant for whose sake another encoder's offer was declined.
    spurned_for: int = 0
    # Whether the claim needs its embedding; False until that is decided.
    wanted: bool = True
    # Its place in the lower half of the memory, if it has ever been there: begin and end.
    low: tuple[int, int] | None = None

    @property
    def here(self) -> bool:
        return self.state in (_S.RECEIVED, _S.CACHED)

    @property
    def begun(self) -> bool:
        """Whether its first rows are here, and others are on their way."""
        return self.state is _S.GRANTED and self.block is not None and self.block.begun > 0

    def move(self, state: ItemState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"item cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass
class RequestEntry:
    age: int
    items: list[Item]
    deadline: float
    # What waits for the items; None before, and while it looks into its prefix cache.
    claim: tuple[Claimant, wire.Claim] | None = None
    # Rows that an early claim was told of, by item.
    told: dict[int, int] = field(default_factory=dict)
    # Items whose offer waits for memory.
    waiting: set[int] = field(default_factory=set)
    error: EpdError | None = None
    # The tokenizer that announced it.
    watcher: bytes | None = None
    # Whether that one is to be told when the first item has landed.
    kept: bool = False
    plan: Plan = Plan.OPEN
    # Until when an offer waits for a plan that is gathering or asking.
    patient_until: float = 0.0
    # The item that a claim missed last: most land in their order.
    _missed: int = 0
    # Items that have been granted, and that rely on a kept embedding; they may be so no more.
    granted: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)

    def go(self, plan: Plan, patient_until: float = 0.0) -> None:
        if plan not in PLANS[self.plan]:
            raise AssertionError(f"a plan cannot go from {self.plan.value} to {plan.value}")
        self.plan, self.patient_until = plan, patient_until

    def satisfies(self, claim: wire.Claim) -> bool:
        """Whether all is here that its claim needs."""
        covered, count = frozenset(claim.covered), len(self.items)
        for number in itertools.chain(range(self._missed, count), range(self._missed)):
            if not (self.items[number].here or number in covered):
                self._missed = number
                return False
        return True

    def is_open(self, but: int = -1) -> bool:
        """Whether an item but this one has no granted memory; a cached one may come to need a
        grant, too. Not those that the prefix cache has."""
        every = self.plan is not Plan.DECIDED or self.claim is None
        # From that item on: encoders offer them in their order.
        others = itertools.chain(self.items[but + 1 :], self.items[: max(0, but)])
        return any(item.block is None and (every or item.wanted) for item in others)

    def senders(self, covered: frozenset[int]) -> set[bytes | None]:
        """The encoders from which items are on their way, but for those that are covered."""
        self.granted = {one for one in self.granted if self.items[one].state is _S.GRANTED}
        blocks = [self.items[number].block for number in self.granted - covered]
        return {block.peer for block in blocks if block is not None}

    def keys_relied_on(self) -> list[bytes]:
        """Of its items whose embeddings are kept."""
        self.cached = {one for one in self.cached if self.items[one].state is _S.CACHED}
        return [self.items[number].key for number in self.cached]

    @property
    def holds(self) -> bool:
        """Whether it has memory."""
        return any(item.block is not None for item in self.items)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where its memory begins and ends."""
        return [item.block.place for item in self.items if item.block is not None]

    def begins_below(self, offset: int) -> bool:
        return any(item.block is not None and item.block.offset < offset for item in self.items)

    @property
    def held_bytes(self) -> int:
        return sum(end - begin for begin, end in self.places)
