from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
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

from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.transfer.blocks import Block
from sglang_epd.transfer.entries import PLANS, TRANSITIONS, Item, ItemState, Plan, RequestEntry
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.ledger import Ledger
from sglang_epd.transfer.reservations import QUARANTINE_S, Reservations
from sglang_epd.wire import messages as wire

PAGE = ALIGNMENT
PAGES = 8
SLOTS = 16
READERS = 3
GRANT_TTL_S = 3.0
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (1, 4)), [[1, 2, 2]])
KEY = b"k" * 32
FOREVER = 1e12


class Books:
    """A ledger with memory that is not there, and everything it asks of the world."""

    def __init__(self, pages: int = PAGES, **more: object) -> None:
        self.drops = np.zeros((SLOTS, READERS), np.uint32)
        self.dead: set[str] = set()
        self.seen: bool | None = None
        self.reservations = Reservations(
            pages * PAGE,
            SLOTS,
            READERS,
            drops=lambda slots: self.drops[slots],
            reset=self._reset,
            writer_lives=lambda process: False if process in self.dead else self.seen,
        )
        self.ledger = Ledger(self.reservations, GRANT_TTL_S, **more)

    def _reset(self, slot: int) -> None:
        self.drops[slot] = 0


def offer(ticket: str, item: int, pages: int = 1, process: str = "") -> wire.Offer:
    return wire.Offer(ticket, item, KEY, LAYOUT, pages * PAGE, process)


def claiming(name: str, expect: wire.Expect, first: int = 0, readers: int = 1) -> wire.Claim:
    return wire.Claim(name, expect, first, readers)


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
    consumers: int = 0
    deadline: float = 0.0
    waiting: dict[str, wire.Claim] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.opened and not self.ended


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
        # What take_outcomes owes: claimant -> grants of its items, or the class of its error.
        self.due: dict[str, list[int] | type[Exception]] = {}
        # All bytes that anybody may write to or read, by grant; and every grant there ever was.
        self.memory: dict[int, Memory] = {}
        self.grants: list[Memory] = []

    # The model.

    def settle(self, ticket: Ticket) -> None:
        complete = len(ticket.received) == ticket.expect.items
        if ticket.error is None and not complete:
            return
        for name, claim in ticket.waiting.items():
            if ticket.error is not None:
                self.due[name] = ticket.error
                continue
            grants = [ticket.received[item] for item in range(ticket.expect.items)]
            self.due[name] = grants
            for grant in grants:
                readers = range(claim.first_reader, claim.first_reader + claim.readers)
                self.memory[grant].readings += readers
        ticket.consumers -= len(ticket.waiting)
        ticket.waiting.clear()
        if ticket.consumers <= 0:
            self.end(ticket)

    def revoke(self, grant: int) -> None:
        memory = self.memory[grant]
        if memory.foreign:
            memory.quarantined = True
            memory.until = self.now + QUARANTINE_S
        else:
            del self.memory[grant]

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
            ticket.consumers = ticket.expect.consumers
            ticket.deadline = self.now + ticket.expect.ttl_s

    def pick(self, index: int) -> Ticket:
        return self.tickets[index % len(self.tickets)]

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

    @initialize(
        shapes=st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 3), st.floats(1, 20)),
            min_size=1,
            max_size=4,
        )
    )
    def plan(self, shapes):
        for number, (items, consumers, ttl_s) in enumerate(shapes):
            self.tickets.append(Ticket(wire.Expect(f"t{number}", items, consumers, ttl_s)))

    @rule(index=st.integers(0, 3))
    def expect(self, index):
        ticket = self.pick(index)
        self.ledger.expect(ticket.expect, self.now)
        self.open_model(ticket)

    @rule(index=st.integers(0, 3), first=st.integers(0, 1), readers=st.integers(1, 2))
    def claim(self, index, first, readers):
        ticket = self.pick(index)
        name = f"c{next(self.names)}"
        self.outstanding.add(name)
        self.open_model(ticket)
        claim = claiming(name, ticket.expect, first, readers)
        self.ledger.claim(name, claim, self.now)
        if ticket.ended:
            self.due[name] = ticket.error or ProtocolError
        elif len(ticket.waiting) >= ticket.consumers:
            self.due[name] = ProtocolError
        else:
            ticket.waiting[name] = claim
            self.settle(ticket)

    @rule(
        index=st.integers(0, 3),
        item=st.integers(0, 3),
        pages=st.sampled_from((1, 1, 1, 2, 3, 8, 9)),
        landing=st.sampled_from(("inline", "shared", "remote")),
        writer=st.sampled_from(("", "one", "other")),
    )
    def offer(self, index, item, pages, landing, writer):
        ticket = self.pick(index)
        name = ticket.expect.ticket
        refusal = self.refusal(ticket, item, pages)
        before = ticket.live.get(item)
        answer = self.ledger.offer(offer(name, item, pages, writer), self.now, landing=landing)
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
        memory = Memory(answer, name, item, landing != "inline", writer, until)
        self.memory[answer.grant] = memory
        self.grants.append(memory)
        ticket.live[item] = answer.grant

    def named(self, index: int) -> tuple[Memory, Ticket]:
        memory = self.grants[index % len(self.grants)]
        return memory, next(t for t in self.tickets if t.expect.ticket == memory.ticket)

    def late(self, grant: int) -> None:
        """Its encoder said that it writes no more."""
        if grant in self.memory and self.memory[grant].quarantined:
            del self.memory[grant]

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
            del ticket.live[memory.item], self.memory[grant]
        else:
            self.late(grant)

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0), kind=st.sampled_from(("ticket", "item", "grant")))
    def stray(self, index, kind):
        """Somebody names a grant that is not its own: nothing comes of it."""
        memory, _ = self.named(index)
        ticket, item, grant = memory.ticket, memory.item, memory.block.grant
        if kind == "ticket":
            ticket = "another"
        elif kind == "item":
            # The ticket's owner may end a quarantine of its own by any name.
            if memory.quarantined:
                return
            item += 1
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

    @rule(index=st.integers(0, 3))
    def fail(self, index):
        ticket = self.pick(index)
        self.ledger.fail(ticket.expect.ticket, EncodeError("no encoder could"), self.now)
        self.fail_model(ticket, EncodeError)

    @rule(index=st.integers(0, 3))
    def cancel(self, index):
        ticket = self.pick(index)
        self.ledger.cancel(ticket.expect.ticket, self.now)
        self.fail_model(ticket, RequestCancelledError)
        if ticket.open:
            self.end(ticket)

    @precondition(lambda self: self.outstanding)
    @rule(index=st.integers(0))
    def abandon(self, index):
        name = sorted(self.outstanding)[index % len(self.outstanding)]
        self.ledger.abandon(name, self.now)
        for ticket in self.tickets:
            if name not in ticket.waiting:
                continue
            del ticket.waiting[name]
            ticket.consumers -= 1
            self.due[name] = RequestCancelledError
            if ticket.consumers <= 0:
                self.fail_model(ticket, RequestCancelledError)
                self.end(ticket)

    @rule(elapsed=st.floats(0, 8) | st.just(QUARANTINE_S))
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

    # What must hold after each of them.

    @invariant()
    def every_claim_settles_once_and_rightly(self):
        for outcome in self.ledger.take_outcomes():
            assert outcome.claimant in self.outstanding
            self.outstanding.remove(outcome.claimant)
            owed = self.due.pop(outcome.claimant)
            if isinstance(owed, list):
                assert outcome.error is None
                where = [(item.slot, item.offset, item.nbytes) for item in outcome.items]
                blocks = [self.memory[grant].block for grant in owed]
                assert where == [(block.slot, block.offset, block.nbytes) for block in blocks]
            else:
                assert type(outcome.error) is owed
                assert not outcome.items
        assert not self.due

    @invariant()
    def the_books_add_up(self):
        self.ledger.check_integrity()
        open_tickets = [ticket for ticket in self.tickets if ticket.open]
        assert len(self.ledger) == len(open_tickets)
        assert self.ledger.claimed == sum(len(ticket.waiting) for ticket in open_tickets)

    @invariant()
    def what_nobody_touches_is_free_and_nothing_else(self):
        reservations = self.books.reservations
        reservations.reclaim(self.now)
        for grant, memory in list(self.memory.items()):
            if memory.quarantined:
                over = memory.until <= self.now or memory.writer in self.books.dead
            else:
                over = not memory.wanted and not memory.readings
            if over:
                del self.memory[grant]
        assert reservations.held_bytes == sum(m.block.nbytes for m in self.memory.values())
        assert reservations.quarantined == sum(m.quarantined for m in self.memory.values())
        assert len(reservations) == len(self.memory)

    def teardown(self):
        self.ledger.expire(FOREVER)
        assert {outcome.claimant for outcome in self.ledger.take_outcomes()} == self.outstanding
        assert (len(self.ledger), self.ledger.claimed) == (0, 0)
        for memory in self.memory.values():
            for reader in memory.readings:
                self.books.drops[memory.block.slot, reader] += 1
        self.books.reservations.reclaim(FOREVER + QUARANTINE_S)
        self.ledger.check_integrity()
        reservations = self.books.reservations
        assert (reservations.held_bytes, len(reservations), reservations.quarantined) == (0, 0, 0)
        blocks = [reservations.grant(1) for _ in range(PAGES)]
        assert all(blocks), "all memory can be used again"


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
        self.seen_news = -1
        for number, items in enumerate(requests):
            expect = wire.Expect(f"t{number}", len(items), 1, 1e6)
            self.ledger.claim(f"t{number}", claiming(f"t{number}", expect), 0.0)
            self.offers += [offer(f"t{number}", at, pages) for at, pages in enumerate(items)]
        rng.shuffle(self.offers)

    def ask(self, message: wire.Offer) -> None:
        answer = self.ledger.offer(message, 0.0)
        if isinstance(answer, Block):
            self.granted[message.ticket, message.item] = answer
        else:
            assert isinstance(answer, wire.Wait), answer
            self.held.append(message)

    def go_on(self) -> None:
        while self.held and self.ledger.news != self.seen_news:
            self.seen_news = self.ledger.news
            held = sorted(self.held, key=lambda message: self.ledger.age(message.ticket))
            self.held = []
            for message in held:
                self.ask(message)

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
                assert self.ledger.fill(wire.Payload(ticket, item, block.grant), 0.0)
            case "drop":
                landed = self.reading.pop(self.rng.randrange(len(self.reading)))
                self.books.drops[landed.slot, 0] += 1
                self.books.reservations.reclaim(0.0)
        for outcome in self.ledger.take_outcomes():
            assert outcome.error is None
            self.done.add(outcome.claimant)
            self.reading += outcome.items
        self.go_on()
        self.ledger.check_integrity()
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


@given(st.lists(single, min_size=1, max_size=12), seeds)
def test_requests_of_one_item_are_all_served(requests, rng):
    Traffic(requests, rng).run()


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(st.lists(several, min_size=2, max_size=8), seeds)
def test_requests_of_at_most_half_of_the_memory_never_block_each_other(requests, rng):
    Traffic(requests, rng).run()


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(st.lists(single | several, min_size=2, max_size=12), seeds)
def test_large_items_and_requests_of_several_never_block_each_other(requests, rng):
    Traffic(requests, rng).run()


def test_scattered_items_do_not_keep_a_large_one_out_for_ever():
    """Items of requests that wait must not lie where the others' largest would have to."""
    rng = random.Random(0)
    traffic = Traffic([[4, 1], *([1] for _ in range(10)), [1, 1, 1], [1, 1, 1]], rng, pages=10)
    singles = [message for message in traffic.offers if 1 <= int(message.ticket[1:]) <= 10]
    for message in singles:
        traffic.ask(message)
    places = sorted(traffic.granted.items(), key=lambda granted: granted[1].offset)
    # A page is freed at a time, and taken by a request that has more to come.
    for at, ticket in ((3, "t11"), (6, "t12")):
        (name, item), block = places[at]
        assert traffic.ledger.fill(wire.Payload(name, item, block.grant), 0.0)
        del traffic.granted[name, item]
        (outcome,) = traffic.ledger.take_outcomes()
        traffic.done.add(name)
        traffic.books.drops[outcome.items[0].slot, 0] += 1
        traffic.books.reservations.reclaim(0.0)
        traffic.ask(offer(ticket, 0))
    asked = {(message.ticket, message.item) for message in traffic.held} | set(traffic.granted)
    traffic.offers = [
        message
        for message in traffic.offers
        if message not in singles and (message.ticket, message.item) not in asked
    ]
    traffic.run()


def test_a_request_that_failed_stands_in_nobodys_way():
    """It stays in the books while not all of its samples have asked for it."""
    traffic = Traffic([[1], *([2, 2, 2] for _ in range(4))], random.Random(1), pages=12)
    traffic.ledger._entries["t0"].consumers = 2
    traffic.offers = [message for message in traffic.offers if message.ticket != "t0"]
    traffic.ledger.fail("t0", EncodeError("x"), 0.0)
    traffic.ledger.take_outcomes()
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


@pytest.fixture
def ledger(books: Books) -> Ledger:
    return books.ledger


def opened(
    ledger: Ledger, items: int = 1, consumers: int = 1, ticket: str = "t", ttl_s: float = 10.0
) -> wire.Expect:
    expect = wire.Expect(ticket, items, consumers, ttl_s)
    ledger.expect(expect, 0.0)
    return expect


def granted(
    ledger: Ledger, item: int = 0, pages: int = 1, ticket: str = "t", landing: str = "inline"
) -> Block:
    block = ledger.offer(offer(ticket, item, pages, "encoder"), 0.0, landing=landing)
    assert isinstance(block, Block), block
    return block


def deliver(ledger: Ledger, item: int = 0, pages: int = 1, ticket: str = "t") -> Block:
    block = granted(ledger, item, pages, ticket)
    assert ledger.fill(wire.Payload(ticket, item, block.grant), 0.0)
    return block


@pytest.mark.parametrize("before", ItemState)
@pytest.mark.parametrize("after", ItemState)
def test_only_the_transitions_of_the_table_are_possible(before, after):
    item = Item(state=before)
    if after in TRANSITIONS[before]:
        item.move(after)
        assert item.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.value} to {after.value}"):
            item.move(after)
        assert item.state is before


@pytest.mark.parametrize("before", Plan)
@pytest.mark.parametrize("after", Plan)
def test_a_plan_goes_as_its_table_says(before, after):
    entry = RequestEntry(age=0, items=[], consumers=1, deadline=1.0, plan=before)
    if after in PLANS[before]:
        entry.go(after)
        assert entry.plan is after
    else:
        with pytest.raises(AssertionError, match=f"{before.value} to {after.value}"):
            entry.go(after)


def test_nothing_comes_back_from_a_final_state():
    assert not TRANSITIONS[ItemState.FAILED]
    assert not TRANSITIONS[ItemState.CANCELLED]
    assert set(TRANSITIONS) == set(ItemState)


def test_an_encoder_that_renews_its_own_offer_is_not_in_its_own_way(books, ledger):
    opened(ledger)
    renewal = wire.Offer("t", 0, KEY, LAYOUT, PAGE, renewal=True)
    old = ledger.offer(offer("t", 0), 0.0, peer=b"one")
    assert ledger.offer(renewal, 0.0, peer=b"another").reason == wire.DECLINE_DUPLICATE
    new = ledger.offer(renewal, 0.0, landing="shared", peer=b"one")
    assert new.grant != old.grant
    assert books.reservations.held_bytes == PAGE
    assert ledger.offer(renewal, 0.0, peer=b"one").grant not in (old.grant, new.grant)
    assert books.reservations.in_doubt == [new]
    ledger.check_integrity()


def test_an_item_offered_again_counts_once(ledger):
    opened(ledger)
    granted(ledger, 0, pages=PAGES // 2)
    granted(ledger, 0, pages=PAGES // 2)
    assert ledger.offer(offer("t", 0, PAGES), 0.0) == wire.Wait("t", 0)


@pytest.mark.parametrize("item", [-1, 1, 2**63 - 1])
def test_a_payload_for_an_item_that_does_not_exist_is_refused(ledger, item):
    opened(ledger)
    block = granted(ledger)
    assert not ledger.fill(wire.Payload("t", item, block.grant), 0.0)
    assert not ledger.withdraw(wire.Withdraw("t", item, block.grant))


def test_an_offer_that_waits_is_granted_when_memory_is_freed(ledger):
    for ticket in ("a", "b"):
        opened(ledger, ticket=ticket)
    block = granted(ledger, ticket="a", pages=PAGES)
    news = ledger.news
    assert ledger.offer(offer("b", 0), 0.0) == wire.Wait("b", 0)
    assert ledger.news == news
    ledger.withdraw(wire.Withdraw("a", 0, block.grant))
    assert ledger.news > news
    granted(ledger, ticket="b")


def test_the_oldest_that_waits_goes_first(ledger):
    for ticket in ("full", "old", "young"):
        opened(ledger, ticket=ticket)
    block = granted(ledger, ticket="full", pages=PAGES - 1)
    assert ledger.offer(offer("old", 0, 2), 0.0) == wire.Wait("old", 0)
    assert ledger.offer(offer("young", 0), 0.0) == wire.Wait("young", 0), "it would fit"
    ledger.withdraw(wire.Withdraw("full", 0, block.grant))
    assert ledger.offer(offer("young", 0), 0.0) == wire.Wait("young", 0)
    granted(ledger, ticket="old", pages=2)
    granted(ledger, ticket="young")


@pytest.mark.parametrize(
    "over",
    [
        lambda ledger: ledger.cancel("old", 0.0),
        lambda ledger: ledger.fail("old", EncodeError("x"), 0.0),
        lambda ledger: ledger.abandon("old", 0.0),
    ],
)
def test_a_request_that_is_over_holds_up_nobody(ledger, over):
    opened(ledger, ticket="full")
    granted(ledger, ticket="full", pages=PAGES - 1)
    expect = opened(ledger, ticket="old")
    ledger.claim("old", claiming("old", expect), 0.0)
    opened(ledger, ticket="young")
    assert ledger.offer(offer("old", 0, 2), 0.0) == wire.Wait("old", 0)
    assert ledger.offer(offer("young", 0), 0.0) == wire.Wait("young", 0)
    news = ledger.news
    over(ledger)
    assert ledger.news > news
    granted(ledger, ticket="young")


def test_a_request_with_items_to_come_leaves_room_for_others(ledger):
    opened(ledger, items=3, ticket="first")
    opened(ledger, items=3, ticket="second")
    granted(ledger, 0, pages=PAGES // 2, ticket="first")
    assert ledger.offer(offer("second", 0, PAGES // 2 + 1), 0.0) == wire.Wait("second", 0)


def test_items_of_a_request_that_has_had_them_are_duplicates(ledger):
    expect = opened(ledger)
    ledger.claim("r", claiming("r", expect), 0.0)
    deliver(ledger)
    assert len(ledger) == 0
    assert ledger.offer(offer("t", 0), 0.0) == wire.Decline("t", 0, wire.DECLINE_DUPLICATE)


def test_no_grant_outlives_its_request(ledger):
    opened(ledger, ttl_s=1.0)
    assert granted(ledger).until == 1.0


def test_a_revoked_grant_is_news_though_nothing_is_free(ledger):
    """What its request held counts no more, so others may have their turn."""
    opened(ledger)
    granted(ledger, landing="shared")
    news = ledger.news
    ledger.expire(GRANT_TTL_S)
    assert ledger.news > news


def test_the_deadline_error_counts_what_is_missing(ledger):
    expect = opened(ledger, items=3)
    ledger.claim("r", claiming("r", expect), 0.0)
    deliver(ledger)
    ledger.expire(9.9)
    assert not ledger.take_outcomes()
    ledger.expire(10.0)
    (outcome,) = ledger.take_outcomes()
    assert isinstance(outcome.error, DeadlineError)
    assert str(outcome.error).startswith("2 of 3 ")
    assert "budget" not in str(outcome.error)


def test_the_deadline_error_names_the_budget_where_that_was_short(ledger):
    opened(ledger, ticket="full", ttl_s=100.0)
    granted(ledger, ticket="full", pages=PAGES)
    expect = opened(ledger)
    ledger.claim("r", claiming("r", expect), 0.0)
    ledger.offer(offer("t", 0), 0.0)
    ledger.expire(10.0)
    (outcome,) = ledger.take_outcomes()
    assert "1 waited for memory (the receive budget)" in str(outcome.error)


def test_only_requests_that_miss_something_count_as_expired():
    books = Books()
    ledger = books.ledger
    opened(ledger, consumers=2, ticket="complete")
    deliver(ledger, ticket="complete")
    opened(ledger, consumers=2, ticket="failed")
    ledger.fail("failed", EncodeError("x"), 0.0)
    opened(ledger, ticket="late")
    ledger.expire(10.0)
    assert len(ledger) == 0
    assert ledger._tally.counts["expired_requests", ""] == 1


def test_a_claimant_asks_once(ledger):
    expect = opened(ledger, consumers=2)
    for _ in range(2):
        ledger.claim("r", claiming("r", expect), 0.0)
    (refused,) = ledger.take_outcomes()
    assert isinstance(refused.error, ProtocolError)
    deliver(ledger)
    (taken,) = ledger.take_outcomes()
    assert taken.error is None


def test_only_so_many_ended_tickets_are_remembered():
    ledger = Books(remembered=3).ledger
    for number in range(10):
        opened(ledger, ticket=f"t{number}")
        ledger.cancel(f"t{number}", 0.0)
    ledger.check_integrity()
    reasons = [ledger.offer(offer(f"t{number}", 0), 0.0).reason for number in range(10)]
    assert reasons == [wire.DECLINE_UNKNOWN] * 7 + [wire.DECLINE_CANCELLED] * 3


def test_books_that_do_not_add_up_are_noticed(ledger):
    expect = opened(ledger)
    ledger.claim("r", claiming("r", expect), 0.0)
    ledger._entries["t"].consumers = 0
    with pytest.raises(AssertionError, match="without consumers"):
        ledger.check_integrity()
