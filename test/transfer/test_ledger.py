from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_epd import wire
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.transfer.ledger import TRANSITIONS, ItemState, Ledger, _Item
from sglang_epd.wire import messages

MAX_ITEM_BYTES = 100
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (1, 4)), [[1, 2, 2]])
KEY = b"k" * 32
FOREVER = 1e12


def offer(ticket: str, item: int, nbytes: int = 16) -> wire.Offer:
    return wire.Offer(ticket, item, KEY, LAYOUT, nbytes)


@dataclass
class Ticket:
    """The model of one request: what the ledger ought to believe of it."""

    expect: wire.Expect
    opened: bool = False
    ended: bool = False
    error: type[Exception] | None = None
    consumers: int = 0
    deadline: float = 0.0
    waiting: list[str] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    received: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.opened and not self.ended


class LedgerMachine(RuleBasedStateMachine):
    """Random interleavings of everything that happens to a ledger, beside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(MAX_ITEM_BYTES)
        self.now = 0.0
        self.rids = itertools.count()
        self.tickets: list[Ticket] = []
        self.outstanding: set[str] = set()
        # What take_settled owes: claim -> its items, or the class of its error.
        self.due: dict[str, list[torch.Tensor] | type[Exception]] = {}
        self.grants: list[wire.Grant] = []

    # The model.

    def settle(self, ticket: Ticket) -> None:
        complete = len(ticket.received) == ticket.expect.items
        if ticket.error is None and not complete:
            return
        for rid in ticket.waiting:
            self.due[rid] = ticket.error or [
                ticket.received[item] for item in range(ticket.expect.items)
            ]
        ticket.consumers -= len(ticket.waiting)
        ticket.waiting.clear()
        if ticket.consumers <= 0:
            self.end(ticket)

    def fail_model(self, ticket: Ticket, error: type[Exception]) -> None:
        if not ticket.open or ticket.error is not None:
            return
        ticket.error = error
        ticket.live.clear()
        ticket.received.clear()
        self.settle(ticket)

    def end(self, ticket: Ticket) -> None:
        ticket.ended = True
        ticket.live.clear()
        ticket.received.clear()

    def open_model(self, ticket: Ticket) -> None:
        if not ticket.opened:
            ticket.opened = True
            ticket.consumers = ticket.expect.consumers
            ticket.deadline = self.now + ticket.expect.ttl_s

    def pick(self, index: int) -> Ticket:
        return self.tickets[index % len(self.tickets)]

    # What happens.

    @initialize(
        shapes=st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 3), st.floats(1, 20)),
            min_size=1,
            max_size=3,
        )
    )
    def plan(self, shapes):
        for number, (items, consumers, ttl_s) in enumerate(shapes):
            self.tickets.append(Ticket(wire.Expect(f"t{number}", items, consumers, ttl_s)))

    @rule(index=st.integers(0, 2))
    def expect(self, index):
        ticket = self.pick(index)
        self.ledger.expect(ticket.expect, self.now)
        self.open_model(ticket)

    @rule(index=st.integers(0, 2))
    def claim(self, index):
        ticket = self.pick(index)
        rid = f"r{next(self.rids)}"
        self.outstanding.add(rid)
        self.open_model(ticket)
        self.ledger.claim(rid, ticket.expect, self.now)
        if ticket.ended:
            self.due[rid] = ticket.error or ProtocolError
        elif len(ticket.waiting) >= ticket.consumers:
            self.due[rid] = ProtocolError
        else:
            ticket.waiting.append(rid)
            self.settle(ticket)

    @rule(index=st.integers(0, 2), item=st.integers(0, 3), nbytes=st.sampled_from((16, 16, 101)))
    def offer(self, index, item, nbytes):
        ticket = self.pick(index)
        answer = self.ledger.offer(offer(ticket.expect.ticket, item, nbytes))
        assert (answer.ticket, answer.item) == (ticket.expect.ticket, item)
        wanted = (
            ticket.open
            and ticket.error is None
            and item < ticket.expect.items
            and item not in ticket.received
            and nbytes <= MAX_ITEM_BYTES
        )
        assert isinstance(answer, wire.Grant) == wanted
        if wanted:
            assert answer.grant not in {grant.grant for grant in self.grants}
            self.grants.append(answer)
            ticket.live[item] = answer.grant

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0), stray=st.sampled_from((0, 0, 0, 0, 1)))
    def payload(self, index, stray):
        granted = self.grants[index % len(self.grants)]
        ticket = next(t for t in self.tickets if t.expect.ticket == granted.ticket)
        message = wire.Payload(granted.ticket, granted.item, granted.grant + stray * 1000)
        embedding = torch.zeros(1, 4)
        if ticket.live.get(granted.item) == message.grant:
            self.ledger.fill(message, embedding)
            del ticket.live[granted.item]
            ticket.received[granted.item] = embedding
            self.settle(ticket)
        else:
            with pytest.raises(ProtocolError):
                self.ledger.fill(message, embedding)

    @rule(index=st.integers(0, 2))
    def fail(self, index):
        ticket = self.pick(index)
        self.ledger.fail(ticket.expect.ticket, EncodeError("no encoder could"))
        self.fail_model(ticket, EncodeError)

    @rule(index=st.integers(0, 2))
    def cancel(self, index):
        ticket = self.pick(index)
        self.ledger.cancel(ticket.expect.ticket)
        if ticket.open:
            self.fail_model(ticket, RequestCancelledError)
            self.end(ticket)

    @precondition(lambda self: self.outstanding)
    @rule(index=st.integers(0))
    def abandon(self, index):
        rid = sorted(self.outstanding)[index % len(self.outstanding)]
        self.ledger.abandon(rid)
        for ticket in self.tickets:
            if rid not in ticket.waiting:
                continue
            ticket.waiting.remove(rid)
            ticket.consumers -= 1
            self.due[rid] = RequestCancelledError
            if ticket.consumers <= 0:
                self.fail_model(ticket, RequestCancelledError)
                self.end(ticket)

    @rule(elapsed=st.floats(0, 8))
    def expire(self, elapsed):
        self.now += elapsed
        over = [ticket for ticket in self.tickets if ticket.open and ticket.deadline <= self.now]
        assert self.ledger.expire(self.now) == len(over)
        for ticket in over:
            self.fail_model(ticket, DeadlineError)
            self.end(ticket)

    # What must hold after each of them.

    @invariant()
    def every_claim_settles_once_and_rightly(self):
        for settled in self.ledger.take_settled():
            assert settled.rid in self.outstanding
            self.outstanding.remove(settled.rid)
            outcome = self.due.pop(settled.rid)
            if isinstance(outcome, list):
                assert settled.error is None
                assert all(
                    item.embedding is embedding
                    for item, embedding in zip(settled.items, outcome, strict=True)
                )
            else:
                assert type(settled.error) is outcome
                assert not settled.items
        assert not self.due

    @invariant()
    def the_books_add_up(self):
        self.ledger.check_integrity()
        open_tickets = [ticket for ticket in self.tickets if ticket.open]
        assert len(self.ledger) == len(open_tickets)
        assert self.ledger.waiting == sum(len(ticket.waiting) for ticket in open_tickets)
        assert self.ledger.held_bytes == 16 * sum(len(ticket.received) for ticket in open_tickets)

    def teardown(self):
        self.ledger.expire(FOREVER)
        left = {settled.rid for settled in self.ledger.take_settled()}
        assert left == self.outstanding
        assert (len(self.ledger), self.ledger.waiting, self.ledger.held_bytes) == (0, 0, 0)
        self.ledger.check_integrity()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.fixture
def ledger():
    return Ledger(MAX_ITEM_BYTES)


def opened(ledger: Ledger, items: int = 1, consumers: int = 1) -> wire.Expect:
    expect = wire.Expect("t", items, consumers, 10.0)
    ledger.expect(expect, 0.0)
    return expect


def deliver(ledger: Ledger, item: int = 0) -> torch.Tensor:
    granted = ledger.offer(offer("t", item))
    assert isinstance(granted, wire.Grant)
    embedding = torch.rand(1, 4)
    ledger.fill(wire.Payload("t", item, granted.grant), embedding)
    return embedding


@pytest.mark.parametrize("before", ItemState)
@pytest.mark.parametrize("after", ItemState)
def test_only_the_transitions_of_the_table_are_possible(before, after):
    item = _Item(state=before)
    if after in TRANSITIONS[before]:
        item.move(after)
        assert item.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.value} to {after.value}"):
            item.move(after)
        assert item.state is before


def test_nothing_comes_back_from_a_final_state():
    assert not TRANSITIONS[ItemState.FAILED]
    assert not TRANSITIONS[ItemState.CANCELLED]
    assert set(TRANSITIONS) == set(ItemState)


def test_items_are_handed_over_in_their_order_and_with_their_identity(ledger):
    expect = opened(ledger, items=2)
    ledger.claim("r", expect, 0.0)
    second, first = deliver(ledger, 1), deliver(ledger, 0)
    (settled,) = ledger.take_settled()
    assert [item.embedding for item in settled.items] == [first, second]
    assert all((item.key, item.layout) == (KEY, LAYOUT) for item in settled.items)


def test_every_sample_of_a_request_gets_the_items(ledger):
    expect = opened(ledger, consumers=3)
    ledger.claim("warm-up", expect, 0.0)
    deliver(ledger)
    assert ledger.held_bytes == 16
    ledger.claim("sample 1", expect, 1.0)
    ledger.claim("sample 2", expect, 2.0)
    assert [settled.rid for settled in ledger.take_settled()] == ["warm-up", "sample 1", "sample 2"]
    assert (len(ledger), ledger.held_bytes) == (0, 0)


def test_a_claim_may_overtake_its_expectation(ledger):
    expect = wire.Expect("t", 1, 1, 10.0)
    ledger.claim("r", expect, 0.0)
    ledger.expect(expect, 5.0)
    deliver(ledger)
    assert [settled.error for settled in ledger.take_settled()] == [None]


def test_a_late_expectation_does_not_open_an_ended_ticket_again(ledger):
    expect = opened(ledger)
    ledger.cancel("t")
    ledger.expect(expect, 1.0)
    assert len(ledger) == 0


def test_the_second_of_two_grants_is_the_good_one(ledger):
    opened(ledger)
    old = ledger.offer(offer("t", 0))
    new = ledger.offer(offer("t", 0))
    with pytest.raises(ProtocolError):
        ledger.fill(wire.Payload("t", 0, old.grant), torch.zeros(1, 4))
    ledger.fill(wire.Payload("t", 0, new.grant), torch.zeros(1, 4))
    assert ledger.held_bytes == 16


@pytest.mark.parametrize(
    ("happened", "reason"),
    [
        (lambda ledger: ledger.cancel("t"), messages.DECLINE_CANCELLED),
        (lambda ledger: ledger.fail("t", EncodeError("x")), messages.DECLINE_CANCELLED),
        (lambda ledger: ledger.expire(11.0), messages.DECLINE_CANCELLED),
        (deliver, messages.DECLINE_DUPLICATE),
    ],
)
def test_an_encoder_is_told_why_it_is_declined(ledger, happened, reason):
    opened(ledger)
    happened(ledger)
    assert ledger.offer(offer("t", 0)) == wire.Decline("t", 0, reason)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (offer("another", 0), messages.DECLINE_UNKNOWN),
        (offer("t", 1), messages.DECLINE_UNKNOWN),
        (offer("t", 0, MAX_ITEM_BYTES + 1), messages.DECLINE_TOO_LARGE),
    ],
)
def test_what_was_never_asked_for_is_declined(ledger, refused, reason):
    opened(ledger)
    assert ledger.offer(refused).reason == reason


@pytest.mark.parametrize("item", [-1, 1, 2**63 - 1])
def test_a_payload_for_an_item_that_does_not_exist_is_refused(ledger, item):
    opened(ledger)
    ledger.offer(offer("t", 0))
    with pytest.raises(ProtocolError):
        ledger.fill(wire.Payload("t", item, 1), torch.zeros(1, 4))


def test_whoever_comes_after_a_failure_is_told_the_same(ledger):
    expect = opened(ledger, consumers=2)
    ledger.claim("early", expect, 0.0)
    ledger.fail("t", EncodeError("no encoder could"))
    ledger.claim("late", expect, 1.0)
    ledger.claim("uninvited", expect, 1.0)
    assert [(s.rid, str(s.error)) for s in ledger.take_settled()] == [
        (rid, "no encoder could") for rid in ("early", "late", "uninvited")
    ]


def test_a_failure_releases_what_had_been_received(ledger):
    opened(ledger, items=2)
    deliver(ledger)
    ledger.fail("t", EncodeError("x"))
    assert ledger.held_bytes == 0


def test_the_deadline_error_counts_what_is_missing(ledger):
    expect = opened(ledger, items=3)
    ledger.claim("r", expect, 0.0)
    deliver(ledger)
    assert ledger.expire(9.9) == 0
    assert ledger.expire(10.0) == 1
    (settled,) = ledger.take_settled()
    assert isinstance(settled.error, DeadlineError)
    assert str(settled.error).startswith("2 of 3 ")


def test_more_claims_than_announced_are_refused(ledger):
    expect = opened(ledger)
    ledger.claim("r", expect, 0.0)
    ledger.claim("uninvited", expect, 0.0)
    (refused,) = ledger.take_settled()
    assert refused.rid == "uninvited"
    assert isinstance(refused.error, ProtocolError)


def test_abandoning_one_sample_leaves_the_others(ledger):
    expect = opened(ledger, consumers=2)
    ledger.claim("a", expect, 0.0)
    ledger.claim("b", expect, 0.0)
    ledger.abandon("a")
    deliver(ledger)
    outcomes = {settled.rid: settled.error for settled in ledger.take_settled()}
    assert isinstance(outcomes["a"], RequestCancelledError)
    assert outcomes["b"] is None
    assert len(ledger) == 0


def test_only_so_many_ended_tickets_are_remembered():
    ledger = Ledger(remembered=3)
    for number in range(10):
        ledger.expect(wire.Expect(f"t{number}", 1, 1, 1.0), 0.0)
        ledger.cancel(f"t{number}")
    ledger.check_integrity()
    reasons = [ledger.offer(offer(f"t{number}", 0)).reason for number in range(10)]
    assert reasons == [messages.DECLINE_UNKNOWN] * 7 + [messages.DECLINE_CANCELLED] * 3


def test_books_that_do_not_add_up_are_noticed(ledger):
    expect = opened(ledger)
    ledger.claim("r", expect, 0.0)
    ledger._entries["t"].consumers = 0
    with pytest.raises(AssertionError, match="without consumers"):
        ledger.check_integrity()
