from __future__ import annotations

import itertools
import random
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from integrity import check_ledger, check_reservations, claimed
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.transfer import blocks, entries
from sglang_epd.transfer import ledger as ledger_module
from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.entries import Item, ItemState, Plan, RequestEntry
from sglang_epd.transfer.reservations import IN_SOCKETS_S, QUARANTINE_S
from sglang_epd.wire import messages as wire
from transfer.books import GRANT_TTL_S, PAGE, PAGES, ROWS, SCHEDULER, Books, key, offer

FOREVER = 1e12


@dataclass
class Memory:
    """The model of one grant's bytes, for as long as anybody may touch them."""

    block: Block
    ticket: str
    item: int
    foreign: bool
    writer: str
    until: float
    readings: list[int] = field(default_factory=list)
    quarantined: bool = False
    # Somebody may yet be handed it.
    wanted: bool = True

    @property
    def span(self) -> tuple[int, int]:
        return self.block.offset, self.block.offset + self.block.nbytes


@dataclass
class Ticket:
    """The model of one request: what the ledger ought to believe of it."""

    expect: wire.Expect
    opened: bool = False
    ended: bool = False
    error: type[Exception] | None = None
    deadline: float = 0.0
    claim: wire.Claim | None = None
    live: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.opened and not self.ended


indices = st.integers(0, 7)
# Items, seconds to its deadline.
shapes = st.tuples(st.integers(1, 3), st.floats(1, 60))


class LedgerMachine(RuleBasedStateMachine):
    """Random interleavings of everything that happens to a ledger, beside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.ledger = self.books.ledger
        self.now = 0.0
        self.names = itertools.count()
        self.tickets: list[Ticket] = []
        self.outstanding: set[str] = set()
        # What each claim is owed: the grants of its items, or the class of its error.
        self.due: dict[str, list[int] | type[Exception]] = {}
        # Of each part of a prompt that was asked for, the item that it ends within.
        self.parts: dict[str, Memory] = {}
        # All bytes that anybody may write to or read, by grant; and every grant there ever was.
        self.memory: dict[int, Memory] = {}
        self.grants: list[Memory] = []

    # The model.

    def settle(self, ticket: Ticket) -> None:
        claim, complete = ticket.claim, len(ticket.received) == ticket.expect.items
        if claim is None or (ticket.error is None and not complete):
            return
        if ticket.error is not None:
            self.due[claim.claim] = ticket.error
        else:
            grants = [ticket.received[item] for item in range(ticket.expect.items)]
            self.due[claim.claim] = grants
            for grant in grants:
                readers = range(claim.first_reader, claim.first_reader + claim.readers)
                self.memory[grant].readings += readers
        self.end(ticket)

    def revoke(self, grant: int) -> None:
        memory = self.memory[grant]
        memory.wanted = False
        if memory.foreign:
            memory.quarantined = True
            memory.until = self.now + QUARANTINE_S

    def release(self, ticket: Ticket) -> None:
        for grant in ticket.live.values():
            self.revoke(grant)
        for grant in ticket.received.values():
            self.memory[grant].wanted = False
        ticket.live.clear()
        ticket.received.clear()

    def fail_model(self, ticket: Ticket, error: type[Exception]) -> None:
        if not ticket.opened:
            # Remembered for whoever comes later.
            ticket.opened = ticket.ended = True
            ticket.error = error
        if not ticket.open or ticket.error is not None:
            return
        ticket.error = error
        self.release(ticket)
        self.settle(ticket)

    def end(self, ticket: Ticket) -> None:
        ticket.ended = True
        self.release(ticket)

    def open_model(self, ticket: Ticket) -> None:
        if not ticket.opened:
            ticket.opened = True
            ticket.deadline = self.now + ticket.expect.ttl_s

    def pick(self, index: int) -> Ticket:
        """One that has not ended, but for two numbers of eight."""
        going = [ticket for ticket in self.tickets if not ticket.ended]
        some = going if going and index < 6 else self.tickets
        return some[index % len(some)]

    def refusal(self, ticket: Ticket, item: int, pages: int) -> str | None:
        if not ticket.opened:
            return wire.DECLINE_UNKNOWN
        if ticket.error is not None:
            return wire.DECLINE_CANCELLED
        if ticket.ended:
            return wire.DECLINE_DUPLICATE
        if item >= ticket.expect.items:
            return wire.DECLINE_UNKNOWN
        if item in ticket.received:
            return wire.DECLINE_DUPLICATE
        held = {**ticket.live, **ticket.received}
        others = sum(self.memory[held[other]].block.nbytes for other in held if other != item)
        return wire.DECLINE_TOO_LARGE if others + pages * PAGE > PAGES * PAGE else None

    # What happens.

    @initialize(shapes=st.lists(shapes, min_size=2, max_size=4))
    def plan(self, shapes):
        for shape in shapes:
            self.request(shape, announced=True)

    @rule(shape=shapes, announced=st.booleans())
    def request(self, shape, announced):
        expect = wire.Expect(f"t{len(self.tickets)}", *shape)
        self.tickets.append(Ticket(expect))
        if announced:
            self.ledger.expect(expect, self.now)
            self.open_model(self.tickets[-1])

    @rule(index=indices)
    def expect(self, index):
        """An announcement comes twice, or late."""
        ticket = self.pick(index)
        self.ledger.expect(ticket.expect, self.now)
        self.open_model(ticket)

    @rule(index=indices, first=st.integers(0, 1), readers=st.integers(1, 2))
    def claim(self, index, first, readers):
        self.claim_of(self.pick(index), first, readers)

    def claim_of(self, ticket, first, readers):
        name = f"c{next(self.names)}"
        self.outstanding.add(name)
        self.open_model(ticket)
        claim = wire.Claim(name, ticket.expect, first, readers)
        self.ledger.claim(SCHEDULER, claim, self.now)
        if ticket.ended:
            self.due[name] = ticket.error or ProtocolError
        elif ticket.claim is not None:
            self.due[name] = ProtocolError
        else:
            ticket.claim = claim
            self.settle(ticket)

    @rule(index=indices, item=st.integers(0, 2), pages=st.integers(1, 3))
    def deliver(self, index, item, pages):
        granted = len(self.grants)
        self.offer(index, item, pages, "inline", "")
        if len(self.grants) > granted:
            self.payload(granted)

    @rule(
        index=indices,
        item=st.integers(0, 9),
        pages=st.sampled_from((1, 1, 1, 2, 3, 8, 9)),
        landing=st.sampled_from(("inline", "shared", "remote")),
        writer=st.sampled_from(("", "one", "other")),
    )
    def offer(self, index, item, pages, landing, writer):
        ticket = self.pick(index)
        # One that it has, but for one number of ten.
        item = item % ticket.expect.items if item < 9 else item
        name = ticket.expect.ticket
        refusal = self.refusal(ticket, item, pages)
        before = ticket.live.get(item)
        asked = offer(name, item, pages=pages, process=writer)
        answer = self.ledger.offer(asked, self.now, landing=landing)
        if refusal is not None:
            assert answer == wire.Decline(name, item, refusal)
            return
        if not isinstance(answer, Block):
            assert answer == wire.Wait(name, item)
            return
        assert answer.grant not in {memory.block.grant for memory in self.grants}
        assert answer.nbytes == pages * PAGE
        begin, end = answer.offset, answer.offset + answer.nbytes
        for other in self.memory.values():
            assert end <= other.span[0] or other.span[1] <= begin, "somebody else's bytes"
            assert other.block.slot != answer.slot, "somebody else's counters"
        if before is not None:
            self.revoke(before)
        until = min(self.now + GRANT_TTL_S, ticket.deadline)
        assert answer.until == until, "no grant outlives its request"
        memory = Memory(answer, name, item, landing != "inline", writer, until)
        self.memory[answer.grant] = memory
        self.grants.append(memory)
        ticket.live[item] = answer.grant

    def named(self, index: int) -> tuple[Memory, Ticket]:
        memory = self.grants[index % len(self.grants)]
        return memory, next(t for t in self.tickets if t.expect.ticket == memory.ticket)

    def late(self, grant: int) -> None:
        """Its encoder said that it writes no more."""
        if grant in self.memory:
            self.memory[grant].quarantined = False

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0))
    def payload(self, index):
        memory, ticket = self.named(index)
        grant = memory.block.grant
        taken = self.ledger.fill(wire.Payload(memory.ticket, memory.item, grant), self.now)
        assert taken == (ticket.live.get(memory.item) == grant)
        if taken:
            ticket.received[memory.item] = ticket.live.pop(memory.item)
            self.settle(ticket)
        else:
            self.late(grant)

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0))
    def withdraw(self, index):
        memory, ticket = self.named(index)
        grant = memory.block.grant
        taken = self.ledger.withdraw(wire.Withdraw(memory.ticket, memory.item, grant))
        assert taken == (ticket.live.get(memory.item) == grant)
        if taken:
            del ticket.live[memory.item]
            memory.wanted = False
        else:
            self.late(grant)

    @precondition(lambda self: self.grants)
    @rule(
        index=st.integers(0),
        kind=st.sampled_from(("ticket", "item", "grant")),
        stray_item=st.sampled_from((-1, 1, 2, 2**63 - 1)),
    )
    def stray(self, index, kind, stray_item):
        """Somebody names a grant that is not its own: nothing comes of it."""
        memory, _ = self.named(index)
        ticket, item, grant = memory.ticket, memory.item, memory.block.grant
        if kind == "ticket":
            ticket = "another"
        elif kind == "item":
            # The ticket's owner may end a quarantine of its own by any name.
            if memory.quarantined:
                return
            item = (item + 1) if stray_item == 1 else stray_item
            if item == memory.item:
                return
        else:
            grant += 1000
        assert self.ledger.granted(wire.Payload(ticket, item, grant)) is None
        assert not self.ledger.fill(wire.Payload(ticket, item, grant), self.now)
        assert not self.ledger.withdraw(wire.Withdraw(ticket, item, grant))

    @precondition(lambda self: any(memory.readings for memory in self.memory.values()))
    @rule(index=st.integers(0), reading=st.integers(0))
    def drop(self, index, reading):
        """A reader drops an item, on whatever thread and at whatever time."""
        read = [memory for memory in self.memory.values() if memory.readings]
        memory = read[index % len(read)]
        reader = memory.readings.pop(reading % len(memory.readings))
        self.books.drops[memory.block.slot, reader] += 1

    @rule(writer=st.sampled_from(("one", "other")))
    def die(self, writer):
        self.books.dead.add(writer)

    @precondition(lambda self: sum(not ticket.ended for ticket in self.tickets) > 2)
    @rule(index=indices, cancelled=st.booleans())
    def fail(self, index, cancelled):
        ticket = self.pick(index)
        if not cancelled:
            self.ledger.fail(ticket.expect.ticket, EncodeError("no encoder could"), self.now)
            self.fail_model(ticket, EncodeError)
            return
        self.ledger.cancel(ticket.expect.ticket, self.now)
        self.fail_model(ticket, RequestCancelledError)
        if ticket.open:
            self.end(ticket)

    @precondition(lambda self: self.outstanding)
    @rule(index=st.integers(0))
    def abandon(self, index):
        name = sorted(self.outstanding)[index % len(self.outstanding)]
        self.ledger.abandon(SCHEDULER, name, self.now)
        for ticket in self.tickets:
            if ticket.open and ticket.claim is not None and ticket.claim.claim == name:
                self.fail_model(ticket, RequestCancelledError)

    @precondition(lambda self: any(memory.quarantined for memory in self.memory.values()))
    @rule()
    def outlast_quarantine(self):
        self.expire(QUARANTINE_S)

    @rule(elapsed=st.floats(0, 1) | st.sampled_from((0.1, 1.0, GRANT_TTL_S)))
    def expire(self, elapsed):
        self.now += elapsed
        self.ledger.expire(self.now)
        for ticket in self.tickets:
            if ticket.open and ticket.deadline <= self.now:
                self.fail_model(ticket, DeadlineError)
                self.end(ticket)
            elif ticket.open:
                for item, grant in list(ticket.live.items()):
                    if self.memory[grant].until <= self.now:
                        self.revoke(grant)
                        del ticket.live[item]

    @precondition(lambda self: any(ticket.live for ticket in self.tickets))
    @rule(index=st.integers(0), rows=st.integers(1, ROWS - 1))
    def begin(self, index, rows):
        """The first rows of an item come, and are handed out before the others are there."""
        live = [(ticket, grant) for ticket in self.tickets for grant in ticket.live.values()]
        ticket, grant = live[index % len(live)]
        memory = self.memory[grant]
        if rows * memory.block.nbytes // ROWS <= memory.block.begun:
            with pytest.raises(ProtocolError):
                self.books.begin(memory.block, rows)
        else:
            self.books.begin(memory.block, rows)
        if ticket.claim is None:
            self.claim_of(ticket, 0, 1)
        claim, part = ticket.claim, f"p{next(self.names)}"
        asked = wire.TakePart(memory.ticket, claim.claim, part, (memory.item,), memory.item)
        self.ledger.hand_part(SCHEDULER, asked)
        self.parts[part] = memory
        memory.readings += range(claim.first_reader, claim.first_reader + claim.readers)

    # What must hold after each of them.

    @invariant()
    def every_claim_settles_once_and_rightly(self):
        for outcome in self.books.outcomes():
            if outcome.claim in self.parts:
                block = self.parts.pop(outcome.claim).block
                (landed,) = filter(None, outcome.items)
                assert (landed.slot, landed.offset) == (block.slot, block.offset)
                assert 0 < landed.nbytes == block.begun < block.nbytes
                continue
            assert outcome.claim in self.outstanding
            self.outstanding.remove(outcome.claim)
            owed = self.due.pop(outcome.claim)
            if isinstance(owed, list):
                assert not outcome.code
                where = [(item.slot, item.offset, item.nbytes) for item in outcome.items]
                blocks = [self.memory[grant].block for grant in owed]
                assert where == [(block.slot, block.offset, block.nbytes) for block in blocks]
            else:
                assert outcome.code == owed.__name__
                assert not outcome.items
        assert not self.due

    @invariant()
    def the_books_add_up(self):
        check_ledger(self.ledger)
        open_tickets = [ticket for ticket in self.tickets if ticket.open]
        assert len(self.ledger) == len(open_tickets)
        assert claimed(self.ledger) == sum(one.claim is not None for one in open_tickets)

    @invariant()
    def what_nobody_touches_is_free_and_nothing_else(self):
        reservations = self.books.reservations
        reservations.reclaim(self.now)
        for grant, memory in list(self.memory.items()):
            if memory.quarantined:
                if memory.writer in self.books.dead:
                    linger = IN_SOCKETS_S if memory.block.landing == "remote" else 0.0
                    memory.until = min(memory.until, self.now + linger)
                memory.quarantined = self.now < memory.until
            if not (memory.quarantined or memory.wanted or memory.readings):
                del self.memory[grant]
        assert reservations.held_bytes == sum(m.block.nbytes for m in self.memory.values())
        assert len(reservations.quarantined) == sum(m.quarantined for m in self.memory.values())
        assert len(reservations) == len(self.memory)

    def teardown(self):
        self.ledger.expire(FOREVER)
        assert {outcome.claim for outcome in self.books.outcomes()} == self.outstanding
        assert (len(self.ledger), claimed(self.ledger)) == (0, 0)
        for memory in self.memory.values():
            for reader in memory.readings:
                self.books.drops[memory.block.slot, reader] += 1
        self.books.reservations.reclaim(FOREVER + QUARANTINE_S)
        check_ledger(self.ledger)
        reservations = self.books.reservations
        assert (reservations.held_bytes, len(reservations), reservations.quarantined) == (0, 0, [])
        assert all(reservations.grant(offer()) for _ in range(PAGES)), "all can be used again"


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=settings.default.max_examples * 6 // 5, stateful_step_count=40, deadline=None
)


# Progress.


class Traffic:
    """Requests whose encoders offer in any order, and whose readers drop in any order.

    Asks again for what waits as the receiver does: only when there is news.
    """

    def __init__(self, requests: list[list[int]], rng: random.Random, pages: int = 16) -> None:
        self.books = Books(pages)
        self.ledger = self.books.ledger
        self.requests = requests
        self.rng = rng
        self.offers: list[wire.Offer] = []
        self.held: list[wire.Offer] = []
        self.granted: dict[tuple[str, int], Block] = {}
        self.reading: list[wire.Landed] = []
        self.done: set[str] = set()
        for number, items in enumerate(requests):
            ticket = f"t{number}"
            self.books.claim(wire.Expect(ticket, len(items), 1e6), ticket)
            self.offers += [offer(ticket, at, pages=pages) for at, pages in enumerate(items)]
        rng.shuffle(self.offers)

    def ask(self, message: wire.Offer) -> None:
        answer = self.ledger.offer(message, 0.0)
        if isinstance(answer, Block):
            self.granted[message.ticket, message.item] = answer
        else:
            assert isinstance(answer, wire.Wait), answer
            self.held.append(message)

    def go_on(self) -> None:
        before = None
        while before != (before := self.ledger.news):
            self.ask_again(self.ledger.take_stirred())
            for ticket in self.ledger.turns():
                self.ask_again({ticket})
        for message in self.held:
            assert isinstance(self.ledger.offer(message, 0.0), wire.Wait), "it was passed over"

    def ask_again(self, handles: set[ledger_module.Handle]) -> None:
        for one in list(self.held):
            if handles & {one.ticket, (one.ticket, one.item), one.key}:
                self.held.remove(one)
                self.ask(one)

    def step(self) -> bool:
        """Whether anything was left that could happen."""
        choices = [
            *(["offer"] if self.offers else []),
            *(["fill"] if self.granted else []),
            *(["drop"] if self.reading else []),
        ]
        if not choices:
            return False
        match self.rng.choice(choices):
            case "offer":
                self.ask(self.offers.pop())
            case "fill":
                ticket, item = self.rng.choice(sorted(self.granted))
                block = self.granted.pop((ticket, item))
                self.books.fill(block)
            case "drop":
                self.books.drop(self.reading.pop(self.rng.randrange(len(self.reading))))
        for outcome in self.books.outcomes():
            assert not outcome.code
            self.done.add(outcome.claim)
            self.reading += outcome.items
        self.go_on()
        check_ledger(self.ledger)
        return True

    def run(self) -> None:
        while self.step():
            pass
        assert not self.held, f"{len(self.held)} offers wait for ever"
        assert len(self.done) == len(self.requests)
        assert self.books.reservations.held_bytes == 0


single = st.lists(st.integers(1, 16), min_size=1, max_size=1)
several = st.lists(st.integers(1, 6), min_size=2, max_size=4).filter(lambda items: sum(items) <= 8)
seeds = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(st.lists(single | several, min_size=2, max_size=12), seeds)
def test_large_items_and_requests_of_several_never_block_each_other(requests, rng):
    Traffic(requests, rng).run()


def test_items_of_one_that_waits_are_packed_for_its_largest_to_fit():
    """The upper half is full of others' items that wait for room, too."""
    traffic = Traffic([[1], *([1, 3] for _ in range(5))], random.Random(0), pages=8)
    for ticket in range(6):
        first = offer(f"t{ticket}")
        traffic.offers.remove(first)
        traffic.ask(first)
    assert len(traffic.held) == 1, "the page beside the first is not taken"
    traffic.run()


def test_a_request_that_failed_stands_in_nobodys_way():
    """It stays in the books until it is asked for."""
    traffic = Traffic([[1], *([2, 2, 2] for _ in range(4))], random.Random(1), pages=12)
    traffic.ledger._entries["t0"].claim = None
    traffic.offers = [message for message in traffic.offers if message.ticket != "t0"]
    traffic.ledger.fail("t0", EncodeError("x"), 0.0)
    traffic.books.outcomes()
    while traffic.step():
        pass
    assert traffic.done == {"t1", "t2", "t3", "t4"}


def test_a_request_that_never_offers_stands_in_nobodys_way():
    traffic = Traffic([[2, 2, 2] for _ in range(4)], random.Random(2), pages=12)
    traffic.offers = [message for message in traffic.offers if message.ticket != "t0"]
    while traffic.step():
        pass
    assert traffic.done == {"t1", "t2", "t3"}


# One thing at a time.


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.mark.parametrize(
    ("table", "states", "move", "final"),
    [
        (
            entries.TRANSITIONS,
            ItemState,
            lambda before, after: Item(state=before).move(after),
            {ItemState.ENDED},
        ),
        (
            entries.PLANS,
            Plan,
            lambda before, after: RequestEntry(0, [], 1, 1.0, plan=before).go(after),
            {Plan.DECIDED},
        ),
        (
            blocks.TRANSITIONS,
            BlockState,
            lambda before, after: Block(1, 0, 0, offer(), [], state=before).move(after),
            {BlockState.FREE},
        ),
    ],
    ids=["items", "plans", "blocks"],
)
def test_only_the_transitions_of_a_table_are_possible(table, states, move, final):
    assert {state for state in states if not table[state]} == final
    for before, after in itertools.product(states, states):
        if after in table[before]:
            move(before, after)
        else:
            with pytest.raises(AssertionError, match=f"{before.value} to {after.value}"):
                move(before, after)


def test_an_encoder_that_renews_its_own_offer_is_not_in_its_own_way(books):
    books.expect()
    renewal, ledger = offer(renewal=True), books.ledger
    old = ledger.offer(offer(), 0.0, peer=b"one")
    assert ledger.offer(renewal, 0.0, peer=b"another").reason == wire.DECLINE_DUPLICATE
    new = ledger.offer(renewal, 0.0, landing="shared", peer=b"one")
    assert new.grant != old.grant
    assert books.reservations.held_bytes == PAGE
    assert ledger.offer(renewal, 0.0, peer=b"one").grant not in (old.grant, new.grant)
    assert books.reservations.quarantined == [new]
    check_ledger(ledger)


def test_the_oldest_that_waits_goes_first(books):
    for ticket in ("full", "old", "young"):
        books.expect(ticket)
    block, ledger = books.grant("full", pages=PAGES - 1), books.ledger
    assert ledger.offer(offer("old", pages=2), 0.0) == wire.Wait("old", 0)
    assert ledger.offer(offer("young"), 0.0) == wire.Wait("young", 0), "it would fit"
    ledger.withdraw(wire.Withdraw(*block.name))
    assert ledger.offer(offer("young"), 0.0) == wire.Wait("young", 0)
    books.grant("old", pages=2)
    books.grant("young")


@pytest.mark.parametrize("waits_first", [True, False])
def test_whose_turn_it_is(waits_first):
    books = Books()
    for ticket, letters in (("full", "?"), ("old", "?"), ("young", "??"), ("last", "?")):
        books.expect(ticket, letters)
    full, ledger = books.grant("full", pages=PAGES // 2), books.ledger
    assert list(ledger.turns()) == [], "none waits"
    large = {ticket: offer(ticket, pages=PAGES // 2 + 1) for ticket in ("young", "last", "old")}
    if not waits_first:
        books.grant("young", item=1)
    assert ledger.offer(large["young"], 0.0) == wire.Wait("young", 0)
    assert list(ledger.turns()) == ["young"]
    if waits_first:
        books.grant("young", item=1)
    for ticket in ("last", "old"):
        assert ledger.offer(large[ticket], 0.0) == wire.Wait(ticket, 0)
    assert list(ledger.turns()) == ["old", "young"], "the oldest, and one that has memory"
    ledger.withdraw(wire.Withdraw(*full.name))
    turns = ledger.turns()
    assert next(turns) == "old"
    assert isinstance(ledger.offer(large["old"], 0.0), Block)
    assert list(turns) == ["young"], "it is the oldest now"
    ledger.cancel("young", 0.0)
    assert list(ledger.turns()) == ["last"]


@pytest.mark.parametrize(
    ("happens", "handle"),
    [
        (lambda books: books.ledger.cancel("young", 0.0), "young"),
        (lambda books: books.deliver("other", letter="y"), key("y")),
        (lambda books: books.grant("young", letter="y"), ("young", 0)),
    ],
    ids=["it is over", "its embedding is here", "another encoder may send it"],
)
def test_an_offer_that_may_hear_something_new_is_named(happens, handle):
    books = Books(kept_pages=PAGES)
    for ticket in ("full", "other", "young"):
        books.expect(ticket)
    books.grant("full", pages=PAGES - 2)
    waiting = offer("young", letter="y", pages=3)
    assert books.ledger.offer(waiting, 0.0) == wire.Wait("young", 0)
    assert not books.ledger.take_stirred() & {"young", ("young", 0), key("y")}
    happens(books)
    assert handle in books.ledger.take_stirred()
    assert not books.ledger.take_stirred(), "each is told once"


@pytest.mark.parametrize(
    "over",
    [
        lambda ledger: ledger.cancel("old", 0.0),
        lambda ledger: ledger.fail("old", EncodeError("x"), 0.0),
        lambda ledger: ledger.abandon(SCHEDULER, "c", 0.0),
    ],
)
def test_a_request_that_is_over_holds_up_nobody(books, over):
    books.expect("full")
    books.grant("full", pages=PAGES - 1)
    books.claim(books.expect("old"))
    books.expect("young")
    assert books.ledger.offer(offer("old", pages=2), 0.0) == wire.Wait("old", 0)
    assert books.ledger.offer(offer("young"), 0.0) == wire.Wait("young", 0)
    news = books.ledger.news
    over(books.ledger)
    assert books.ledger.news > news
    books.grant("young")


def test_what_a_request_gave_back_of_the_lower_half_is_filled_again(books):
    """Else it would wait for what others hold, and they for it, until a deadline."""
    books.expect("others", letters="?" * 5)
    for item in range(PAGES // 2):
        books.grant("others", item)
    books.expect("t", letters="?" * 4)
    blocks = [books.grant("t", item) for item in range(3)]
    for block in blocks[:2]:
        assert books.ledger.withdraw(wire.Withdraw(*block.name))
    again = [books.grant("t", item) for item in range(4) if item != 2]
    assert sorted(block.offset // PAGE for block in [*again, blocks[2]]) == [0, 1, 2, 3]
    check_ledger(books.ledger)


def test_what_a_request_needs_of_the_lower_half_fits_whatever_it_gave_back():
    books = Books(pages=16)
    books.expect("others", letters="?" * 9)
    for item in range(8):
        books.grant("others", item)
    books.expect("t", letters="?" * 4)
    first, _ = books.grant("t", 0, pages=3), books.grant("t", 1)
    assert books.ledger.withdraw(wire.Withdraw(*first.name))
    for item, pages in ((2, 2), (3, 2), (0, 3)):
        books.grant("t", item, pages=pages)
    check_ledger(books.ledger)


def test_a_revoked_grant_is_news_though_nothing_is_free(books):
    """What its request held counts no more, so others may have their turn."""
    books.expect()
    books.grant(landing="shared")
    news = books.ledger.news
    books.ledger.expire(GRANT_TTL_S)
    assert books.ledger.news > news


def test_the_deadline_error_counts_what_is_missing_and_names_the_budget_where_that_was_short(books):
    books.claim(books.expect(letters="???"), "missing")
    books.deliver()
    books.expect("full", ttl_s=100.0)
    books.claim(books.expect("poor"), "poor")
    books.grant("full", pages=PAGES - 1)
    assert books.ledger.offer(offer("poor"), 0.0) == wire.Wait("poor", 0)
    books.ledger.expire(9.9)
    assert not books.outcomes()
    books.ledger.expire(10.0)
    missing, poor = books.outcomes()
    assert missing.code == poor.code == "DeadlineError"
    assert missing.message.startswith("2 of 3 ")
    assert "budget" not in missing.message
    assert "1 waited for memory (the receive budget)" in poor.message


def test_only_requests_that_miss_something_count_as_expired(books):
    books.expect("complete")
    books.deliver("complete")
    books.expect("failed")
    books.ledger.fail("failed", EncodeError("x"), 0.0)
    books.expect("late")
    books.ledger.expire(10.0)
    assert len(books.ledger) == 0
    assert books.tally.counts["expired_requests", ""] == 1


@pytest.mark.parametrize("waits", [False, True])
def test_a_tokenizer_that_keeps_its_request_is_told_of_the_first_item(books, waits):
    expect = books.expect(letters="??", waits=waits)
    assert not books.needed()
    books.deliver(item=1)
    assert books.needed() == [wire.Needed("t", begun=True)] * waits
    books.claim(expect)
    books.deliver(item=0)
    assert [needed.over for needed in books.needed()] == [True]
    assert books.settled()


@pytest.mark.parametrize("name", ["c", "another"])
def test_items_are_claimed_once(books, name):
    expect = books.expect()
    books.claim(expect)
    books.claim(expect, name)
    (refused,) = books.outcomes()
    assert refused.code == "ProtocolError"
    books.deliver()
    assert books.settled()


@pytest.mark.parametrize("way", ["handed", "part"])
def test_more_tokens_than_any_context_holds_are_not_handed_on(books, monkeypatch, way):
    """Their layouts would be longer than a message may be, which ended the scheduler."""
    monkeypatch.setattr(ledger_module, "_MOST_TOKENS", 2 * ROWS)
    books.claim(books.expect("t", "???"))
    for item, letter in enumerate("cd"):
        books.deliver("t", item, letter)
    if way == "part":
        books.ledger.hand_part(SCHEDULER, wire.TakePart("t", "c", "part", (0, 1), -1))
        (outcome,) = books.outcomes()
        assert (outcome.claim, outcome.code, outcome.items) == ("part", "MediaTooLargeError", ())
    books.deliver("t", 2, "e")
    (outcome,) = books.outcomes()
    assert (outcome.claim, outcome.code, outcome.items) == ("c", "MediaTooLargeError", ())
    assert "take 12 tokens" in outcome.message
    assert not books.blocks


def test_only_so_many_ended_tickets_are_remembered(books, monkeypatch):
    monkeypatch.setattr(ledger_module, "_MAX_ENDED", 3)
    for number in range(10):
        books.expect(f"t{number}")
        books.ledger.cancel(f"t{number}", 0.0)
    check_ledger(books.ledger)
    reasons = [books.ledger.offer(offer(f"t{number}"), 0.0).reason for number in range(10)]
    assert reasons == [wire.DECLINE_UNKNOWN] * 7 + [wire.DECLINE_CANCELLED] * 3


def test_books_that_do_not_add_up_are_noticed(books):
    books.claim(books.expect())
    books.ledger._entries["t"].error = EncodeError("x")
    with pytest.raises(AssertionError, match="failed request is still waited for"):
        check_ledger(books.ledger)


# Memory alone.


def test_there_are_as_many_blocks_as_slots():
    reservations = Books(pages=4, slots=2).reservations
    first, _ = reservations.grant(offer()), reservations.grant(offer())
    assert reservations.grant(offer()) is None
    reservations.free(first)
    assert reservations.grant(offer()) is not None


def quarantined(books: Books, process: str = "encoder") -> Block:
    block = books.reservations.grant(offer(process=process))
    block.landing = "shared"
    books.reservations.revoke(block, 0.0)
    return block


def test_memory_of_an_encoder_that_is_seen_to_live_is_kept_for_as_long_as_it_does(books):
    books.seen = True
    block = quarantined(books)
    books.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.QUARANTINED
    books.dead.add("encoder")
    books.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.FREE


def test_an_encoder_with_many_blocks_is_looked_for_once(books, monkeypatch):
    """Each look reads /proc, and housekeeping is every 5 ms."""
    looks: list[str] = []
    monkeypatch.setattr(books.reservations, "_writer_lives", looks.append)
    blocks = [quarantined(books) for _ in range(3)]
    books.reservations.reclaim(0.0)
    assert looks == [blocks[0].offer.process]


def test_what_an_ended_encoder_sent_is_not_written_to_anothers_memory(books):
    """Of its connection by Mooncake over TCP the system may still have bytes."""
    books.seen = True
    block = quarantined(books)
    block.landing = "remote"
    books.reservations.reclaim(QUARANTINE_S)
    books.dead.add("encoder")
    for seconds in (0.0, 0.5 * IN_SOCKETS_S):
        books.reservations.reclaim(QUARANTINE_S + seconds)
        assert block.state is BlockState.QUARANTINED
    books.reservations.reclaim(QUARANTINE_S + IN_SOCKETS_S)
    assert block.state is BlockState.FREE


def test_an_encoder_without_a_name_is_given_the_whole_time(books):
    block = quarantined(books, process="")
    books.dead.add("")
    books.reservations.reclaim(QUARANTINE_S - 1)
    assert block.state is BlockState.QUARANTINED
    books.reservations.reclaim(QUARANTINE_S)
    assert block.state is BlockState.FREE


def test_a_block_that_another_request_was_handed_stays(books):
    reservations = books.reservations
    block = reservations.grant(offer())
    reservations.fill(block)
    for closed in (False, True):
        reservations.hand(block, 0, 1)
        if closed:
            reservations.close(block)
            reservations.reclaim(0.0)
            assert block.state is BlockState.HANDED, "the second reading is still to be dropped"
        books.drops[block.slot, 0] += 1
        reservations.reclaim(0.0)
        assert block.state is (BlockState.FREE if closed else BlockState.HANDED)


def test_memory_that_does_not_add_up_is_noticed(books):
    block = books.reservations.grant(offer())
    block.state = BlockState.QUARANTINED
    with pytest.raises(AssertionError, match="wrong list"):
        check_reservations(books.reservations)


# The lower half of the memory.


def others_fill_the_upper_half(books):
    books.expect("others", letters="?" * (PAGES // 2 + 1))
    for item in range(PAGES // 2):
        books.grant("others", item)


def test_what_a_frozen_encoder_may_write_to_is_passed_over(books):
    """Else a request would wait for its half, and others for it, for as long as that is frozen."""
    books.expect("frozen")
    books.grant("frozen", landing="shared")
    books.ledger.cancel("frozen", 0.0)
    (frozen,) = books.reservations.quarantined
    assert frozen.offset == 0
    others_fill_the_upper_half(books)
    books.expect("t", letters="???")
    assert [books.grant("t", item).offset // PAGE for item in range(3)] == [1, 2, 3]
    check_ledger(books.ledger)


def test_an_item_leaves_its_place_to_a_frozen_encoder_of_its_own(books):
    others_fill_the_upper_half(books)
    books.expect("t", letters="??")
    first = books.grant("t", landing="shared", peer=b"frozen")
    again = books.grant("t", landing="shared", peer=b"another")
    assert (first.offset, again.offset) == (0, PAGE)
    assert books.reservations.quarantined == [first]
    books.reservations.settle_late(first.grant, "t")
    assert books.grant("t", 1).offset == 0, "the one after it takes the place that is free again"
    check_ledger(books.ledger)


def test_a_request_does_not_wait_for_its_own_last_item(books):
    books.expect("t", letters="???")
    blocks = [books.grant("t", item) for item in range(3)]
    assert blocks[2].offset == 0
    for block in blocks[:2]:
        assert books.ledger.withdraw(wire.Withdraw(*block.name))
    others_fill_the_upper_half(books)
    assert [books.grant("t", item).offset // PAGE for item in range(2)] == [1, 2]


def test_an_item_takes_no_memory_that_its_own_request_relies_on():
    """While there is some that nothing relies on, used later."""
    books = Books(pages=4, kept_pages=4)
    for letter in "abcd":
        if letter == "d":
            books.expect("t", letters="c?")
        books.claim(books.expect(letter))
        books.deliver(letter, letter=letter)
        books.drop(*books.settled()[0])
    assert books.kept == "abcd"
    books.grant("t", 1, letter="e")
    assert books.kept == "abc"


@pytest.mark.parametrize("early", [False, True])
def test_an_item_costs_the_same_whatever_its_requests_size(early):
    """Thousands of pictures in one request would keep a scheduler's process for a minute."""

    def calls(count: int) -> int:
        """Calls of functions until all items are there."""
        books = Books(pages=3 * count, slots=count)
        expect = books.expect(letters="?" * count)
        claim = wire.Claim("c", expect, 0, 1, prefix=True, early=early)
        books.ledger.claim(SCHEDULER, claim, 0.0)
        made = 0

        def count_call(_frame, event, _of):
            nonlocal made
            made += event == "call"

        sys.setprofile(count_call)
        try:
            blocks = []
            for item in range(count):
                blocks.append(books.grant("t", item, peer=bytes([item % 8])))
                if item >= 8:
                    books.fill(blocks[item - 8])
            for block in blocks[-8:]:
                books.fill(block)
        finally:
            sys.setprofile(None)
        assert isinstance(books.outcomes()[-1], wire.Settled)
        return made

    assert calls(400) < 6 * calls(100)


def test_what_the_prefix_cache_has_is_not_waited_for(books):
    others_fill_the_upper_half(books)
    books.expect("holder", letters="??")
    books.grant("holder")
    books.claim(books.expect("t", letters="ab", laid=True), covered=(0,))
    assert isinstance(books.ledger.offer(offer("t", 1, letter="b"), 0.0), Block)


@pytest.mark.parametrize("ends", ["withdraws", "says nothing more"])
def test_an_item_that_its_last_encoder_was_declined_for_is_sent_for_again(books, ends):
    """One that was taken for dead came back and took the item from the one that had it."""
    books.expect()
    for peer in (b"back", b"another"):
        books.grant(peer=peer)
    block = books.grant(peer=b"back")
    renewal = offer(renewal=True)
    assert books.ledger.offer(renewal, 0.0, peer=b"another").reason == wire.DECLINE_DUPLICATE
    assert not books.needed()
    if ends == "withdraws":
        books.ledger.withdraw(wire.Withdraw(*block.name))
    else:
        books.ledger.expire(GRANT_TTL_S)
    assert books.needed() == [wire.Needed("t", (0,))]
    books.grant(peer=b"another")
    check_ledger(books.ledger)


def test_an_item_that_nobody_was_declined_for_is_its_dispatchers(books):
    books.expect()
    books.ledger.withdraw(wire.Withdraw(*books.grant().name))
    assert not books.needed()
