"""The ledger: expected, granted and received items; decides to grant, hold or decline
offers, and to use an embedding that is kept.

One entry a request (by ticket), one record an item. An item whose embedding is cached for
another request is not received again: it is pinned when its own request is passed on, and
encoded after all if it was evicted before. Synchronous and without a clock: the caller
passes `now` in seconds of any monotonic clock.

Owns the decision to grant, decline or let wait, the claim of a request, and the end of
an entry. Does not own memory (`reservations`), sockets, the scheduler's requests, or
retries (the dispatcher's).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaTooLargeError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.tally import Tally
from sglang_epd.transfer.blocks import Block
from sglang_epd.transfer.entries import Claimant, Item, ItemState, Plan, RequestEntry
from sglang_epd.transfer.extents import ALIGNMENT, aligned
from sglang_epd.transfer.reservations import Reservations
from sglang_epd.wire import messages as wire

_S = ItemState
# How long an offer of an item that was here before waits for the layouts of its request's
# other items, and then for a scheduler, which may be in a forward pass.
_LAYOUTS_S = 0.5
_PREFIX_S = 5.0
_MAX_SEEN = 65_536
# No model's context is as long; their layouts are half of what a message may be, with a time for
# each token.
_MOST_TOKENS = 1 << 22
# Ended tickets that are remembered, to tell a late offer why it is declined.
_MAX_ENDED = 4096
# Names offers that wait: all of a ticket, those of one item of it, or those of a key.
Handle = str | tuple[str, int] | bytes


class Ledger:
    """The receiver's books.

    Args:
        reservations: the memory that grants are made of.
        grant_ttl_s: how long an encoder may take from the grant to the payload.
        tally: counts events.
    """

    def __init__(self, reservations: Reservations, grant_ttl_s: float, tally: Tally) -> None:
        self.reservations = reservations
        self._grant_ttl_s = grant_ttl_s
        self._tally = tally
        # In order of age.
        self._entries: dict[str, RequestEntry] = {}
        # Of each: its error, and its last message to its tokenizer.
        self._ended: dict[str, tuple[EpdError | None, wire.Needed]] = {}
        self._messages: list[tuple[bytes, wire.Message]] = []
        # Keys of items that requests went on with, so that the prefix cache may have them.
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        # Items whose embeddings are cached, by key.
        self._relying: dict[bytes, set[tuple[str, int]]] = {}
        reservations.listen(self._on_evict)
        self._next_age = 0
        # Grows when it may be another request's turn to take memory.
        self._turns = 0
        self._stirred: set[Handle] = set()
        # Of those that wait for memory, the ones that have some, among others that had.
        self._partly: dict[str, RequestEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def news(self) -> int:
        """Grows whenever it is worth it to ask again for the offers that have their `turns`."""
        return self.reservations.freed + self._turns

    def take_stirred(self) -> set[Handle]:
        """Offers that may be answered otherwise for another reason than memory, each told once."""
        stirred, self._stirred = self._stirred, set()
        return stirred

    def turns(self) -> Iterator[str]:
        """Tickets that may take memory before others that wait for some, oldest first.

        To be gone on with when the offers of a ticket have been asked for again: that may give
        another its turn. Of thousands of offers that wait, all but a few would only be told to
        wait on.
        """
        entries = self._entries
        self._partly = {t: one for t, one in self._partly.items() if one.waiting and one.holds}
        partly = deque(sorted(self._partly, key=self.age))
        asked: set[str] = set()
        while True:
            while partly and partly[0] in asked:
                partly.popleft()
            oldest = next((ticket for ticket, one in entries.items() if one.waiting), None)
            able = [*([] if oldest is None or oldest in asked else [oldest]), *list(partly)[:1]]
            if not able:
                return
            ticket = min(able, key=self.age)
            asked.add(ticket)
            yield ticket

    @property
    def waiting(self) -> int:
        """Offers that wait for memory."""
        return sum(len(entry.waiting) for entry in self._entries.values())

    def knows(self, ticket: str) -> bool:
        """Whether a ticket was announced, as far back as that is remembered."""
        return ticket in self._entries or ticket in self._ended

    def is_granted(self, ticket: str, item: int) -> bool:
        """Whether an encoder has memory for an item that has not landed."""
        entry = self._entries.get(ticket)
        items = () if entry is None else entry.items
        return 0 <= item < len(items) and items[item].state is _S.GRANTED

    def age(self, ticket: str) -> int:
        """Sorts tickets, oldest first; those that are not open come first."""
        entry = self._entries.get(ticket)
        return -1 if entry is None else entry.age

    def expect(self, message: wire.Expect, now: float, watcher: bytes | None = None) -> None:
        """Open an entry; nothing happens if the ticket has ended.

        Args:
            watcher: the connection of the tokenizer that is told which items are needed.
        """
        ticket = message.ticket
        if ticket in self._ended:
            self._notify(watcher, self._ended[ticket][1])
            return
        entry = self._entries.get(ticket)
        if entry is None:
            keys = message.keys or (b"",) * message.items
            entry = self._entries[ticket] = RequestEntry(
                age=self._next_age,
                # Items without a key are being sent for.
                items=[Item(key, asked=not key, wanted=not message.layouts) for key in keys],
                deadline=now + message.ttl_s,
                plan=Plan.UNDECIDED if message.layouts else Plan.OPEN,
                kept=message.waits,
            )
            self._next_age += 1
            for number, item in enumerate(entry.items):
                if item.key and self.reservations.find(item.key) is not None:
                    self._rely(ticket, number, item)
                    self._tally.add("hits", "expected")
        if watcher is not None:
            entry.watcher = watcher
            self._tell_needed(ticket, entry, first=any(item.key for item in entry.items))

    def claim(self, peer: bytes, message: wire.Claim, now: float) -> None:
        """Claim a ticket's items.

        A request may overtake its own `Expect`, so the claim opens the entry too.

        Args:
            peer: the connection over which the outcome is told.
        """
        ticket = message.expect.ticket
        claimant = peer, message.claim
        self.expect(message.expect, now)
        entry = self._entries.get(ticket)
        if entry is None:
            gone = ProtocolError("the request's items are gone")
            self._answer(claimant, error=self._ended[ticket][0] or gone)
        elif entry.claim is not None:
            error = ProtocolError("another request has claimed the items")
            self._answer(claimant, error=error)
        else:
            entry.claim = claimant, message
            entry.told.clear()
            covered = frozenset(message.covered)
            first = entry.plan is Plan.UNDECIDED
            for number, item in enumerate(entry.items):
                item.wanted = number not in covered
            if first or entry.plan is Plan.ASKING:
                entry.go(Plan.DECIDED)
                self._stirred.add(ticket)
            self._tell_needed(ticket, entry, first=first)
            self._ask_prefix(ticket, entry, now)
            self._settle(ticket, now)

    def offer(
        self,
        message: wire.Offer,
        now: float,
        *,
        landing: str = "inline",
        peer: bytes | None = None,
    ) -> Block | wire.Decline | wire.Wait:
        """Decide on an encoder's offer; a block is a grant.

        An encoder that offers an item anew has never heard of its grant, or has given it up.

        Args:
            landing: the way its payload is to come.
            peer: the encoder's connection; None is none.
        """
        entry = self._entries.get(message.ticket)
        if entry is not None and peer is not None and 0 <= message.item < len(entry.items):
            self._take_back(entry.items[message.item], peer, now)
        reason = self._refusal(entry, message)
        if reason is not None:
            if entry is not None:
                self._stop_waiting(entry, message.item)
                if reason == wire.DECLINE_DUPLICATE:
                    item = entry.items[message.item]
                    item.spurned_for = item.block.grant if item.block is not None else 0
            return wire.Decline(message.ticket, message.item, reason)
        assert entry is not None
        item = entry.items[message.item]
        own_key = item.key in (b"", message.key)
        if item.state is _S.PLANNED and own_key and self.reservations.find(message.key):
            self._stop_waiting(entry, message.item)
            item.key = message.key
            self._rely(message.ticket, message.item, item)
            self._tally.add("hits", "offered")
            self._settle(message.ticket, now)
            self._ask_prefix(message.ticket, entry, now)
            return wire.Decline(message.ticket, message.item, wire.DECLINE_CACHED)
        if self._prefix_first(entry, message, now):
            return wire.Wait(message.ticket, message.item)
        if entry.error is not None:
            return wire.Decline(message.ticket, message.item, wire.DECLINE_CANCELLED)
        block = self._room(entry, message)
        if block is None:
            entry.waiting.add(message.item)
            if entry.holds:
                self._partly[message.ticket] = entry
            return wire.Wait(message.ticket, message.item)
        self._stop_waiting(entry, message.item)
        if item.block is not None:
            self._revoke(item, now)
        item.move(_S.GRANTED)
        item.block = block
        entry.granted.add(message.item)
        self._stirred.add((message.ticket, message.item))
        if entry.waiting:
            self._partly[message.ticket] = entry
        block.peer, block.landing = peer, landing
        block.until = min(now + self._grant_ttl_s, entry.deadline)
        if not entry.is_open(message.item):
            self._turns += 1
        self._tally.add("grants")
        return block

    def granted(self, message: wire.Payload | wire.Withdraw) -> Block | None:
        """The block that a payload belongs in, if its grant is live."""
        item = self._granted(message)
        return None if item is None else item.block

    def begin(self, message: wire.Payload) -> None:
        """Note that the first `offset` bytes of a payload are in its block, which is granted.

        Raises:
            ProtocolError: they are no more than before, or not whole rows.
        """
        item = self._granted(message)
        assert item is not None
        assert item.block is not None
        block = item.block
        row_bytes = block.nbytes // max(block.offer.layout.tokens, 1)
        if not block.begun < message.offset < block.nbytes or message.offset % row_bytes:
            raise ProtocolError("payload: no more whole rows than before")
        block.begun = message.offset
        self._tell_arrived(self._entries[message.ticket], (message.item,))

    def fill(self, message: wire.Payload, now: float) -> bool:
        """Note that all of a payload is in its block.

        Args:
            message: the last frame's.

        Returns:
            False if there is no such grant.
        """
        item = self._granted(message)
        if item is None:
            self.reservations.settle_late(message.grant, message.ticket)
            return False
        assert item.block is not None
        item.move(_S.RECEIVED)
        # By a key that is not the item's own other requests must not find it.
        own_key = item.key in (b"", item.block.offer.key)
        if self.reservations.fill(item.block, findable=own_key):
            self._stirred.add(item.block.offer.key)
        self._stirred.add((message.ticket, message.item))
        self._tally.add("received_bytes", amount=item.block.nbytes)
        entry = self._entries[message.ticket]
        if entry.kept:
            entry.kept = False
            self._notify(entry.watcher, wire.Needed(message.ticket, begun=True))
        self._settle(message.ticket, now, (message.item,))
        return True

    def withdraw(self, message: wire.Payload | wire.Withdraw) -> bool:
        """Take a grant back that its encoder will not use; the item is as if never offered.

        Returns:
            Whether there was such a grant.
        """
        item = self._granted(message)
        if item is None:
            self.reservations.settle_late(message.grant, message.ticket)
            return False
        assert item.block is not None
        self.reservations.give_up(item.block)
        item.block = None
        self._stirred.add((message.ticket, message.item))
        self._plan_again(message.ticket, item, message.grant)
        return True

    def _plan_again(self, ticket: str, item: Item, grant: int) -> None:
        """An item's grant is over without its payload. Its encoder says so to its dispatcher; one
        that was declined for it has said that all is well."""
        item.move(_S.PLANNED)
        if item.spurned_for == grant:
            item.asked = False
            self._tell_needed(ticket, self._entries[ticket])

    def fail(self, ticket: str, error: EpdError, now: float) -> None:
        """End the request with `error`; a later claim gets the same error."""
        entry = self._entries.get(ticket)
        if entry is None and ticket not in self._ended:
            # Word of its end was faster than its announcement.
            self._remember(ticket, error, wire.Needed(ticket, over=True))
        if entry is None or entry.error is not None:
            return
        entry.error = error
        for number, item in enumerate(entry.items):
            self._release(ticket, number, now)
            item.move(_S.ENDED)
        entry.waiting.clear()
        self._stirred.add(ticket)
        self._turns += 1
        self._settle(ticket, now)

    def cancel(self, ticket: str, now: float) -> None:
        """End a request whose tokenizer has ended it; it will not be claimed."""
        self.fail(ticket, RequestCancelledError("the client went away"), now)
        self._end(ticket)

    def hand_part(self, peer: bytes, message: wire.TakePart) -> None:
        """Hand some items of a claim out that are here; the claim waits on for all of them."""
        entry = self._entries.get(message.ticket)
        asked = set(message.items)
        if (
            entry is None
            or entry.claim is None
            or entry.claim[0] != (peer, message.claim)
            or not all(entry.items[item].here for item in asked - {message.begun})
            or not all(entry.items[item].here or entry.items[item].begun for item in asked)
        ):
            gone = RequestCancelledError("the items are gone, or the claim is over")
            self._answer((peer, message.name), error=gone)
            return
        if (error := _too_long(self._layouts(entry, asked))) is not None:
            self._answer((peer, message.name), error=error)
            return
        landed = tuple(
            self._landed(entry, entry.claim[1], number) if number in asked else None
            for number in range(len(entry.items))
        )
        self._answer((peer, message.name), landed)

    def abandon(self, peer: bytes, claim: str, now: float) -> None:
        """Give a claim up; its claimant gets an outcome without items."""
        claimant = peer, claim
        error = RequestCancelledError("the request was aborted")
        for ticket, entry in self._entries.items():
            if entry.claim is not None and entry.claim[0] == claimant:
                self.fail(ticket, error, now)
                return

    def expire(self, now: float) -> None:
        """End the entries past their deadline, and the grants past theirs.

        Args:
            now: in seconds of the owner's clock, as all times of a ledger.
        """
        for ticket, entry in list(self._entries.items()):
            if now >= entry.deadline:
                missing = sum(item.wanted and not item.here for item in entry.items)
                text = (
                    f"{missing} of {len(entry.items)} multimodal items had not arrived "
                    "from the encoders at the request's deadline"
                )
                if entry.waiting:
                    text += f"; {len(entry.waiting)} waited for memory (the receive budget)"
                if missing and entry.error is None:
                    self._tally.add("expired_requests")
                self.fail(ticket, DeadlineError(text), now)
                self._end(ticket)
                continue
            if entry.patient_until and now >= entry.patient_until:
                entry.patient_until = 0.0
                if entry.plan is Plan.GATHERING:
                    entry.go(Plan.DECIDED)
                self._stirred.add(ticket)
            for number in sorted(entry.granted):
                item = entry.items[number]
                if item.state is _S.GRANTED and item.block and now >= item.block.until:
                    self._tally.add("expired_grants")
                    grant = item.block.grant
                    self._revoke(item, now)
                    self._plan_again(ticket, item, grant)

    def take_messages(self) -> list[tuple[bytes, wire.Message]]:
        """Messages to connections of the control channel, each returned once."""
        messages, self._messages = self._messages, []
        return messages

    def _refusal(self, entry: RequestEntry | None, message: wire.Offer) -> str | None:
        ended = self._ended.get(message.ticket)
        error = entry.error if entry is not None else ended[0] if ended else None
        if error is not None:
            return wire.DECLINE_CANCELLED
        if entry is None:
            return wire.DECLINE_DUPLICATE if ended else wire.DECLINE_UNKNOWN
        if message.item >= len(entry.items):
            return wire.DECLINE_UNKNOWN
        item = entry.items[message.item]
        renewed = item.state is _S.GRANTED and message.renewal
        if item.here or renewed:
            return wire.DECLINE_CACHED if item.state is _S.CACHED else wire.DECLINE_DUPLICATE
        if item.state is _S.PLANNED and entry.plan is not Plan.UNDECIDED and not item.wanted:
            return wire.DECLINE_COVERED
        return wire.DECLINE_TOO_LARGE if self._too_large(entry, message) else None

    def _too_large(self, entry: RequestEntry, message: wire.Offer) -> bool:
        if aligned(message.nbytes) + self.reservations.held_bytes <= self.reservations.extents.size:
            return False
        before = entry.items[message.item].block
        others = entry.held_bytes - (aligned(before.nbytes) if before else 0)
        return others + aligned(message.nbytes) > self.reservations.extents.size

    def _prefix_first(self, entry: RequestEntry, message: wire.Offer, now: float) -> bool:
        """Whether an offer has to wait until the prefix cache was asked about its request.

        That is done where the item has been here before, and takes the layouts of all the
        request's items, so for a short while only.
        """
        item = entry.items[message.item]
        item.laid = message.key, message.layout
        seen = message.key in self._seen
        if seen and entry.plan is Plan.OPEN:
            entry.go(Plan.GATHERING, now + _LAYOUTS_S)
        self._ask_prefix(message.ticket, entry, now)
        return seen and item.state is _S.PLANNED and now < entry.patient_until

    def _ask_prefix(self, ticket: str, entry: RequestEntry, now: float) -> None:
        """Have the claimant look into its prefix cache, if it has yet to and can."""
        if entry.plan is not Plan.GATHERING or entry.claim is None or not entry.claim[1].prefix:
            return
        laid = [self._laid(item) for item in entry.items]
        known = tuple(one for one in laid if one is not None)
        if len(known) < len(laid):
            return
        (peer, claim), _ = entry.claim
        keys, layouts = zip(*known, strict=True)
        if (error := _too_long(layouts)) is not None:
            self.fail(ticket, error, now)
            return
        entry.claim = None
        entry.go(Plan.ASKING, now + _PREFIX_S)
        self._messages.append((peer, wire.AskPrefix(claim, keys, layouts)))

    def _laid(self, item: Item) -> tuple[bytes, wire.Layout] | None:
        if item.state is _S.CACHED:
            block = self.reservations.find(item.key)
            assert block is not None
            return block.offer.key, block.offer.layout
        return item.laid

    def _room(self, entry: RequestEntry, message: wire.Offer) -> Block | None:
        """Memory for an offer, if it is its turn.

        Requests that hold some of their items while they wait for memory for the others
        could block each other. So those that would still have items to come take the
        upper half of the memory, and leave the lower half to requests that will end by
        themselves. One of them at a time takes from the lower half too, packed from its
        beginning, each item at a place of its own: so it comes to its end if it needs at most
        half of the memory, however the others' items lie, and whatever it gave back. Requests
        that hold nothing yet go by age, those that do before them.
        """
        if not self._has_turn(entry):
            return None
        for key in entry.keys_relied_on():
            self.reservations.find(key)  # the last to go for this item's sake
        if not entry.is_open(message.item):
            return self.reservations.grant(message)
        half = self.reservations.extents.size // 2 // ALIGNMENT * ALIGNMENT
        upper = half, self.reservations.extents.size
        block = self.reservations.grant(message, high=True, within=upper)
        if block is not None:
            return block
        others = (other for other in self._entries.values() if other.is_open())
        if entry is not next((other for other in others if other.begins_below(half)), entry):
            return None
        item = entry.items[message.item]
        place = self._low_place(entry, item, aligned(message.nbytes))
        block = self.reservations.grant(message, within=place)
        if block is not None:
            item.low = place
        return block

    def _low_place(self, entry: RequestEntry, item: Item, nbytes: int) -> tuple[int, int]:
        """An item's place in the lower half: the one that it had, or the first that is neither
        another item's of its request, nor memory that a frozen encoder may write to. What else is
        there ends by itself."""
        taken = entry.places + [
            other.low
            for other in entry.items
            if other.low is not None and other is not item and other.block is None
        ]
        taken += [block.place for block in self.reservations.quarantined]
        if item.low is not None and item.low[1] - item.low[0] == nbytes:
            begin, end = item.low
            if not any(one < end and begin < other for one, other in taken):
                return item.low
        begin = 0
        for one, other in sorted(taken):
            if begin + nbytes <= one:
                break
            begin = max(begin, other)
        return begin, begin + nbytes

    def _has_turn(self, entry: RequestEntry) -> bool:
        """Whether it may take memory before those that wait for some."""
        oldest = next((other for other in self._entries.values() if other.waiting), entry)
        return entry.age <= oldest.age or entry.holds

    def _take_back(self, item: Item, peer: bytes, now: float) -> None:
        """An item's grant, if that encoder has it."""
        if item.block is not None and item.state is _S.GRANTED and item.block.peer == peer:
            self._revoke(item, now)
            item.move(_S.PLANNED)

    def _stop_waiting(self, entry: RequestEntry, number: int) -> None:
        if number in entry.waiting:
            entry.waiting.remove(number)
            self._turns += 1

    def _granted(self, message: wire.Payload | wire.Withdraw) -> Item | None:
        entry = self._entries.get(message.ticket)
        if entry is None or not 0 <= message.item < len(entry.items):
            return None
        item = entry.items[message.item]
        live = item.state is _S.GRANTED and item.block and item.block.grant == message.grant
        return item if live else None

    def _revoke(self, item: Item, now: float) -> None:
        assert item.block is not None
        self.reservations.revoke(item.block, now)
        self._stirred.add((item.block.offer.ticket, item.block.offer.item))
        item.block = None
        self._turns += 1

    def _release(self, ticket: str, number: int, now: float) -> None:
        """The item's memory is not wanted any more, in any of its states."""
        item = self._entries[ticket].items[number]
        if item.state is _S.CACHED:
            self._stop_relying(ticket, number, item.key)
        if item.block is None:
            return
        if item.state is _S.RECEIVED:
            self.reservations.close(item.block)
        else:
            self.reservations.revoke(item.block, now)
        item.block = None

    def _rely(self, ticket: str, number: int, item: Item) -> None:
        item.move(_S.CACHED)
        self._stirred.add((ticket, number))
        item.asked = True
        self._entries[ticket].cached.add(number)
        self._relying.setdefault(item.key, set()).add((ticket, number))

    def _stop_relying(self, ticket: str, number: int, key: bytes) -> None:
        relying = self._relying[key]
        relying.remove((ticket, number))
        if not relying:
            del self._relying[key]

    def _on_evict(self, key: bytes) -> None:
        """An embedding had to make room: items that relied on it need an encoder after all."""
        self._tally.add("evictions")
        for ticket, number in self._relying.pop(key, ()):
            entry = self._entries[ticket]
            entry.items[number].move(_S.PLANNED)
            entry.items[number].asked = False
            entry.told.pop(number, None)
            self._stirred.add((ticket, number))
            self._tell_needed(ticket, entry)

    def _tell_needed(self, ticket: str, entry: RequestEntry, *, first: bool = False) -> None:
        """Say which items have to be encoded, if that is news."""
        if entry.watcher is None or entry.plan is Plan.UNDECIDED or entry.error is not None:
            return
        needed = [
            number
            for number, item in enumerate(entry.items)
            if item.state is _S.PLANNED and item.wanted and not item.asked
        ]
        if needed or first:
            for number in needed:
                entry.items[number].asked = True
            self._notify(entry.watcher, wire.Needed(ticket, tuple(needed)))

    def _notify(self, watcher: bytes | None, message: wire.Needed) -> None:
        if watcher is not None:
            self._messages.append((watcher, message))

    def _answer(
        self,
        claimant: Claimant,
        items: tuple[wire.Landed | None, ...] = (),
        error: EpdError | None = None,
    ) -> None:
        peer, claim = claimant
        code, text = (error.code, error.message) if error else ("", "")
        self._messages.append((peer, wire.Settled(claim, items, code, text)))

    def _settle(self, ticket: str, now: float, landed: Sequence[int] | None = None) -> None:
        """Tell the outcome, if there is one, to the claimant, and end the entry.

        Args:
            landed: the items of which there is news; None is all of them.
        """
        entry = self._entries.get(ticket)
        if entry is None or entry.claim is None:
            return
        claimant, claim = entry.claim
        over = None
        satisfied = entry.error is None and entry.satisfies(claim)
        if satisfied:
            others = set(range(len(entry.items))).difference(claim.covered)
            entry.error = _too_long(self._layouts(entry, others))
        if entry.error is not None:
            self._answer(claimant, error=entry.error)
        elif satisfied:
            over = self._hand(entry, claimant, claim)
        else:
            self._tell_arrived(entry, range(len(entry.items)) if landed is None else landed)
            return
        # Not again when the entry is ended: its readers hold the received items.
        for number in range(len(entry.items)):
            self._release(ticket, number, now)
        self._end(ticket, over)

    def _hand(self, entry: RequestEntry, claimant: Claimant, claim: wire.Claim) -> wire.Needed:
        """Hand all items that a claim needs to its readers; returns its tokenizer's last word."""
        if claim.prefix:
            for item in entry.items:
                self._see(item.key if item.block is None else item.block.offer.key)
        covered = frozenset(claim.covered)
        cached = sum(
            item.state is _S.CACHED and number not in covered
            for number, item in enumerate(entry.items)
        )
        landed = tuple(
            None if number in covered else self._landed(entry, claim, number)
            for number in range(len(entry.items))
        )
        self._answer(claimant, landed)
        return wire.Needed(claim.expect.ticket, over=True, covered=len(covered), cached=cached)

    def _block(self, item: Item) -> Block:
        """Of an item that is here, or whose first rows are."""
        block = item.block or self.reservations.find(item.key)
        assert block is not None
        return block

    def _layouts(self, entry: RequestEntry, numbers: Iterable[int]) -> list[wire.Layout]:
        return [self._block(entry.items[number]).offer.layout for number in numbers]

    def _landed(self, entry: RequestEntry, claim: wire.Claim, number: int) -> wire.Landed:
        """Hand an item to the readers of a claim."""
        item = entry.items[number]
        block = self._block(item)
        self.reservations.hand(block, claim.first_reader, claim.readers)
        key, layout = block.offer.key, block.offer.layout
        nbytes = block.nbytes if item.here else block.begun
        return wire.Landed(key, layout, nbytes, block.slot, block.offset)

    def _tell_arrived(self, entry: RequestEntry, news: Sequence[int]) -> None:
        """Tell an early claimant of items and rows that have landed since it was last told."""
        if entry.claim is None or not entry.claim[1].early:
            return
        (peer, name), claim = entry.claim
        covered = frozenset(claim.covered)
        senders: set[bytes | None] | None = None
        for number in news:
            item = entry.items[number]
            if number in covered or not (item.here or item.begun):
                continue
            block = self._block(item)
            tokens = block.offer.layout.tokens
            rows = tokens if item.here else tokens * block.begun // block.nbytes
            if entry.told.get(number) != rows:
                entry.told[number] = rows
                senders = entry.senders(covered) if senders is None else senders
                elsewhere = item.block is not None and bool(senders - {item.block.peer})
                arrived = wire.Arrived(name, number, rows, rows == tokens, elsewhere)
                self._messages.append((peer, arrived))

    def _see(self, key: bytes) -> None:
        """A request with that item goes on; the prefix cache will have it."""
        if key:
            if key not in self._seen:
                self._stirred.add(key)
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)

    def _end(self, ticket: str, over: wire.Needed | None = None) -> None:
        entry = self._entries.pop(ticket, None)
        if entry is None:
            return
        self._stirred.add(ticket)
        self._turns += 1
        aborted = isinstance(entry.error, RequestCancelledError)
        over = over or wire.Needed(ticket, over=True, aborted=aborted)
        self._remember(ticket, entry.error, over)
        self._notify(entry.watcher, over)

    def _remember(self, ticket: str, error: EpdError | None, over: wire.Needed) -> None:
        self._ended[ticket] = error, over
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]


def _too_long(layouts: Iterable[wire.Layout]) -> EpdError | None:
    """Why these are not handed on together."""
    tokens = sum(layout.tokens for layout in layouts)
    if tokens < _MOST_TOKENS:
        return None
    return MediaTooLargeError(f"the request's media take {tokens} tokens")
