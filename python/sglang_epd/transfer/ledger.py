"""What a language server expects, has granted and has received.

One entry a request (by ticket), one record an item. Synchronous and without a
clock: the caller passes `now` in seconds of any monotonic clock.

Owns the decision to grant or decline, who waits for a request, and when an entry
ends. Does not own sockets, the scheduler's requests, or retries (the dispatcher's).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

import torch

from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.wire import messages as wire


class ItemState(Enum):
    PLANNED = "planned"
    GRANTED = "granted"
    RECEIVED = "received"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = ItemState
# A second grant replaces the first when an item is dispatched again because its
# encoder froze or died after the offer; the first encoder's late payload names the
# old grant and is dropped.
TRANSITIONS: dict[ItemState, frozenset[ItemState]] = {
    _S.PLANNED: frozenset({_S.GRANTED, _S.FAILED, _S.CANCELLED}),
    _S.GRANTED: frozenset({_S.GRANTED, _S.RECEIVED, _S.FAILED, _S.CANCELLED}),
    _S.RECEIVED: frozenset({_S.FAILED, _S.CANCELLED}),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True)
class ReceivedItem:
    """An item's identity, layout and embedding [tokens, width], on the host."""

    key: bytes
    layout: wire.Layout
    embedding: torch.Tensor


@dataclass(frozen=True)
class Settled:
    """A waiting scheduler request can go on: with its items, or with an error."""

    rid: str
    items: tuple[ReceivedItem, ...] = ()
    error: EpdError | None = None


@dataclass
class _Item:
    state: ItemState = ItemState.PLANNED
    grant: int = 0
    offer: wire.Offer | None = None
    received: ReceivedItem | None = None

    def move(self, state: ItemState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"item cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass
class _Entry:
    items: list[_Item]
    consumers: int
    deadline: float
    waiting: list[str] = field(default_factory=list)
    error: EpdError | None = None

    @property
    def complete(self) -> bool:
        return all(item.state is _S.RECEIVED for item in self.items)


class Ledger:
    """The receiver's books.

    Args:
        max_item_bytes: an offer of more is declined for good.
        remembered: how many ended tickets are remembered, to tell a late offer
            why it is declined.
    """

    def __init__(self, max_item_bytes: int = 2 << 30, remembered: int = 4096) -> None:
        self._max_item_bytes = max_item_bytes
        self._remembered = remembered
        self._entries: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, EpdError | None] = OrderedDict()
        self._settled: list[Settled] = []
        self._next_grant = 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Scheduler requests that wait for items."""
        return sum(len(entry.waiting) for entry in self._entries.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of embeddings received and not yet handed over."""
        return sum(
            item.received.embedding.nbytes
            for entry in self._entries.values()
            for item in entry.items
            if item.received is not None
        )

    def expect(self, message: wire.Expect, now: float) -> None:
        """Open an entry; nothing happens if the ticket is open or has ended."""
        if message.ticket in self._entries or message.ticket in self._ended:
            return
        self._entries[message.ticket] = _Entry(
            items=[_Item() for _ in range(message.items)],
            consumers=message.consumers,
            deadline=now + message.ttl_s,
        )

    def claim(self, rid: str, message: wire.Expect, now: float) -> None:
        """A scheduler request asks for the ticket's items.

        The request may overtake its own `Expect`, so the claim opens the entry too.
        """
        self.expect(message, now)
        entry = self._entries.get(message.ticket)
        if entry is None:
            error = self._ended.get(message.ticket)
            self._settled.append(
                Settled(rid, error=error or ProtocolError("the request's items are gone"))
            )
            return
        if len(entry.waiting) >= entry.consumers:
            error = ProtocolError("more requests claim the items than were announced")
            self._settled.append(Settled(rid, error=error))
            return
        entry.waiting.append(rid)
        self._settle(message.ticket)

    def offer(self, message: wire.Offer) -> wire.Grant | wire.Decline:
        """Decide on an encoder's offer."""
        entry = self._entries.get(message.ticket)
        if entry is None:
            reason = wire.DECLINE_UNKNOWN
            if message.ticket in self._ended:
                complete = self._ended[message.ticket] is None
                reason = wire.DECLINE_DUPLICATE if complete else wire.DECLINE_CANCELLED
            return wire.Decline(message.ticket, message.item, reason)
        if entry.error is not None:
            return wire.Decline(message.ticket, message.item, wire.DECLINE_CANCELLED)
        if message.item >= len(entry.items):
            return wire.Decline(message.ticket, message.item, wire.DECLINE_UNKNOWN)
        if message.nbytes > self._max_item_bytes:
            return wire.Decline(message.ticket, message.item, wire.DECLINE_TOO_LARGE)
        item = entry.items[message.item]
        if item.state is _S.RECEIVED:
            return wire.Decline(message.ticket, message.item, wire.DECLINE_DUPLICATE)
        item.move(_S.GRANTED)
        item.offer = message
        item.grant = self._next_grant
        self._next_grant += 1
        return wire.Grant(message.ticket, message.item, item.grant)

    def granted_offer(self, message: wire.Payload) -> wire.Offer:
        """The offer under which a payload may be taken.

        Raises:
            ProtocolError: nothing was granted under that ticket, item and grant.
        """
        item = self._granted(message)
        if item is None or item.offer is None:
            raise ProtocolError("no such grant")
        return item.offer

    def fill(self, message: wire.Payload, embedding: torch.Tensor) -> None:
        """Take the payload of a live grant.

        Raises:
            ProtocolError: nothing was granted under that ticket, item and grant.
        """
        offer = self.granted_offer(message)
        item = self._granted(message)
        assert item is not None
        item.move(_S.RECEIVED)
        item.received = ReceivedItem(offer.key, offer.layout, embedding)
        self._settle(message.ticket)

    def fail(self, ticket: str, error: EpdError) -> None:
        """End the request with `error`; whoever claims it later is told the same."""
        entry = self._entries.get(ticket)
        if entry is None or entry.error is not None:
            return
        ended = _S.CANCELLED if isinstance(error, RequestCancelledError) else _S.FAILED
        for item in entry.items:
            item.move(ended)
            item.received = item.offer = None
        entry.error = error
        self._settle(ticket)

    def cancel(self, ticket: str) -> None:
        """The tokenizer's request is over; nobody will claim it."""
        self.fail(ticket, RequestCancelledError("the client went away"))
        self._end(ticket)

    def abandon(self, rid: str) -> None:
        """A scheduler request stops waiting, and is told so."""
        error = RequestCancelledError("the request was aborted")
        for ticket, entry in list(self._entries.items()):
            if rid not in entry.waiting:
                continue
            entry.waiting.remove(rid)
            entry.consumers -= 1
            self._settled.append(Settled(rid, error=error))
            if entry.consumers <= 0:
                self.fail(ticket, error)
                self._end(ticket)

    def expire(self, now: float) -> int:
        """End the entries past their deadline; returns how many."""
        expired = [ticket for ticket, entry in self._entries.items() if now >= entry.deadline]
        for ticket in expired:
            entry = self._entries[ticket]
            missing = sum(item.state is not _S.RECEIVED for item in entry.items)
            self.fail(
                ticket,
                DeadlineError(
                    f"{missing} of {len(entry.items)} multimodal items had not arrived "
                    "from the encoders at the request's deadline"
                ),
            )
            self._end(ticket)
        return len(expired)

    def take_settled(self) -> list[Settled]:
        """Requests that can go on, each handed out once."""
        settled, self._settled = self._settled, []
        return settled

    def check_integrity(self) -> None:
        """Raise AssertionError if the books do not add up."""
        for ticket, entry in self._entries.items():
            assert ticket not in self._ended, "an open ticket is also ended"
            assert entry.consumers > 0, "an entry without consumers is kept"
            assert len(entry.waiting) <= entry.consumers, "more claims than consumers"
            for item in entry.items:
                held = item.received is not None
                assert held == (item.state is _S.RECEIVED), "embedding held in a wrong state"
            if entry.waiting:
                assert not entry.complete, "a complete request still waits"
                assert entry.error is None, "a failed request still waits"
        assert len(self._ended) <= self._remembered

    def _granted(self, message: wire.Payload) -> _Item | None:
        entry = self._entries.get(message.ticket)
        if entry is None or not 0 <= message.item < len(entry.items):
            return None
        item = entry.items[message.item]
        live = item.state is _S.GRANTED and item.grant == message.grant
        return item if live else None

    def _settle(self, ticket: str) -> None:
        """Hand the outcome, if there is one, to everybody who waits for it."""
        entry = self._entries[ticket]
        if entry.error is None and not entry.complete:
            return
        items = tuple(item.received for item in entry.items if item.received is not None)
        for rid in entry.waiting:
            self._settled.append(
                Settled(rid, error=entry.error)
                if entry.error is not None
                else Settled(rid, items=items)
            )
        entry.consumers -= len(entry.waiting)
        entry.waiting.clear()
        if entry.consumers <= 0:
            self._end(ticket)

    def _end(self, ticket: str) -> None:
        entry = self._entries.pop(ticket, None)
        if entry is None:
            return
        self._ended[ticket] = entry.error
        while len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
