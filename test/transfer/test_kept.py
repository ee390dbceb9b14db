"""What a receiver keeps of embeddings, and what requests make of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from integrity import check_ledger
from sglang_epd.errors import EncodeError, ProtocolError
from sglang_epd.transfer import ledger as ledger_module
from sglang_epd.transfer.blocks import Block
from sglang_epd.transfer.entries import ItemState
from sglang_epd.transfer.ledger import _LAYOUTS_S as LAYOUTS_S
from sglang_epd.transfer.ledger import _PREFIX_S as PREFIX_S
from sglang_epd.wire import messages as wire
from transfer.books import (
    LAYOUT,
    PAGE,
    PAGES,
    READERS,
    ROWS,
    SCHEDULER,
    TOKENIZER,
    Books,
    key,
    offer,
)

CACHED = wire.Decline("u", 0, wire.DECLINE_CACHED)


def keeping(kept_pages: int = PAGES, pages: int = PAGES) -> Books:
    return Books(pages, kept_pages)


def claimed(books: Books, expect: wire.Expect, name: str = "c") -> list[tuple[wire.Landed, ...]]:
    """Claim a ticket; what has settled since the last time."""
    books.claim(expect, name)
    return books.settled()


def serve(books: Books, ticket: str, letters: str) -> None:
    """A request from its beginning to its end."""
    expect = books.expect(ticket, letters)
    for needed in books.needed():
        for item in needed.items if needed.ticket == ticket else ():
            books.deliver(ticket, item, letters[item])
    (landed,) = claimed(books, expect)
    assert [item.key for item in landed] == [key(letter) for letter in letters]
    books.drop(*landed)
    books.needed()
    check_ledger(books.ledger)


def test_what_is_here_is_not_needed_again():
    books = keeping()
    serve(books, "t", "ab")
    assert books.kept == "ab"
    expect = books.expect("u", "abc")
    assert books.needed() == [wire.Needed("u", (2,))]
    assert not claimed(books, expect)
    books.deliver("u", 2, "c")
    (landed,) = books.settled()
    assert [item.key for item in landed] == [key(letter) for letter in "abc"]
    assert books.needed() == [wire.Needed("u", over=True, cached=2)]
    books.drop(*landed)
    assert books.kept == "abc"
    assert books.tally.counts["hits", "expected"] == 2


def test_it_is_found_while_others_hold_or_read_it_and_stays_until_all_have_dropped_it():
    books = keeping()
    first = books.expect("t", "a")
    books.deliver("t", 0, "a")
    (early,) = claimed(books, books.expect("u", "a"))
    books.drop(*early)
    assert not books.kept, "its own request is not through with it"
    (own,) = claimed(books, first)
    assert own == early
    (late,) = claimed(books, books.expect("v", "a"))
    assert late == own
    books.drop(*own)
    assert not books.kept
    books.drop(*late)
    assert books.kept == "a"
    check_ledger(books.ledger)


def test_an_offer_of_what_is_here_is_declined_and_needs_no_bytes():
    books = keeping()
    expect = books.expect("u", "?")
    serve(books, "t", "a")
    for _ in range(2):
        assert books.ledger.offer(offer("u", 0, "a"), 0.0) == CACHED
    (landed,) = claimed(books, expect)
    assert landed[0].key == key("a")
    assert books.tally.counts["grants", ""] == 1


def test_an_offer_that_waits_is_declined_when_another_request_has_received_the_same():
    books = keeping(pages=2)
    books.expect("t", "a")
    block = books.grant("t", 0, "a", pages=2)
    waiting, again = books.expect("u", "?"), offer("u", 0, "a", pages=2)
    assert isinstance(books.ledger.offer(again, 0.0), wire.Wait)
    books.ledger.take_stirred()
    books.fill(block)
    assert key("a") in books.ledger.take_stirred(), "the receiver asks again"
    assert books.ledger.offer(again, 0.0) == CACHED
    assert claimed(books, waiting)
    check_ledger(books.ledger)


def test_what_is_kept_makes_room_least_recently_used_first():
    books = keeping()
    for number, letter in enumerate("abcdefgh"):
        serve(books, f"t{number}", letter)
    serve(books, "again", "a")
    books.expect("soon", "b")
    books.expect("u")
    books.deliver("u", 0, "x", pages=3)
    assert books.kept == "abfgh", "three had to go, and not those just used, or needed soon"
    assert books.tally.counts["evictions", ""] == 3
    check_ledger(books.ledger)


def test_what_is_kept_stays_where_its_room_would_not_be_enough():
    books = keeping()
    for number, letter in enumerate("abcdefgh"):
        serve(books, f"t{number}", letter)
    (landed,) = claimed(books, books.expect("u", "cf"))
    assert books.reservations.grant(offer("v", 0, "x", pages=3)) is None
    within = PAGE, 3 * PAGE
    assert books.reservations.grant(offer("v", 0, "x", pages=2), within=within) is None
    assert books.kept == "abdegh"
    block = books.reservations.grant(offer("v", 0, "x", pages=2))
    assert block is not None
    books.reservations.free(block)
    books.drop(*landed)
    check_ledger(books.ledger)


def test_what_had_to_make_room_before_it_was_used_is_needed_after_all():
    books = keeping(pages=2)
    serve(books, "t", "a")
    relying = books.expect("u", "a")
    assert books.needed() == [wire.Needed("u")], "nothing is needed"
    books.expect("v")
    books.grant("v", 0, "x", pages=2)
    assert wire.Needed("u", (0,)) in books.needed()
    assert not claimed(books, relying)
    books.ledger.cancel("v", 0.0)
    books.deliver("u", 0, "a")
    assert books.settled()
    check_ledger(books.ledger)


def test_nothing_is_kept_without_a_capacity_and_no_more_than_it():
    books = keeping(kept_pages=0)
    serve(books, "t", "a")
    assert (books.kept, books.reservations.held_bytes) == ("", 0)
    assert books.reservations.find(key("a")) is None
    books = keeping(kept_pages=2)
    serve(books, "t", "abc")
    assert books.reservations.kept_bytes == 2 * PAGE
    books.expect("u")
    books.deliver("u", 0, "y", pages=3)
    books.ledger.fail("u", EncodeError("no"), 0.0)
    assert "y" not in books.kept, "larger than all that may be kept"


def test_a_key_that_is_not_the_items_own_is_not_found_by_others():
    books = keeping()
    expect = books.expect("t", "a")
    books.deliver("t", 0, "b")
    claimed(books, expect)
    assert books.reservations.find(key("a")) is None
    assert books.reservations.find(key("b")) is None
    serve(books, "u", "c")
    books.expect("v", "a")
    assert isinstance(books.ledger.offer(offer("v", 0, "c"), 0.0), Block), "nor is it given to it"


def test_a_request_that_ended_needs_nothing():
    books = keeping()
    books.ledger.fail("t", EncodeError("no"), 0.0)
    books.expect("t", "a")
    assert books.needed() == [wire.Needed("t", over=True)]


def test_a_tokenizer_hears_that_its_request_was_aborted():
    books = keeping()
    books.claim(books.expect("t", "a"))
    books.needed()
    books.ledger.abandon(SCHEDULER, "c", 0.0)
    assert books.needed() == [wire.Needed("t", over=True, aborted=True)]
    books.claim(books.expect("u", "a"))
    books.needed()
    books.ledger.fail("u", EncodeError("no"), 0.0)
    assert books.needed() == [wire.Needed("u", over=True)], "its dispatch has said so itself"


def test_a_claim_that_overtakes_the_announcement_takes_nothing_along():
    """All of a request may be here, and its claim settled, before its tokenizer is heard."""
    books = keeping()
    serve(books, "t", "a")
    keys = tuple(map(key, "ab"))
    assert not claimed(books, wire.Expect("u", 2, 100.0, keys))
    books.expect("u", "ab")
    assert books.needed() == [wire.Needed("u", (1,))]
    ends = []
    for claim_first in (False, True):
        books = keeping()
        serve(books, "t", "ac")
        expect = wire.Expect("u", 3, 10.0, tuple(map(key, "abc")), (LAYOUT,) * 3)
        if claim_first:
            books.claim(expect, covered=(1,))
        books.expect("u", "abc", laid=True)
        if not claim_first:
            books.claim(expect, covered=(1,))
        ends.append(books.needed()[-1])
    assert ends == [wire.Needed("u", over=True, covered=1, cached=2)] * 2


def test_of_items_that_are_sent_for_there_is_nothing_to_tell():
    books = keeping()
    books.expect("t", "??")
    assert books.needed() == []
    books.expect("u", "?a")
    assert books.needed() == [wire.Needed("u", (1,))]


def test_a_request_that_fails_asks_for_nothing_more():
    """Its end makes room by what it relied on."""
    books = keeping(kept_pages=1)
    books.expect("before", "a")
    books.deliver("before", 0, "a")
    books.ledger.cancel("before", 0.0)
    assert books.kept == "a"
    books.expect("t", "ba")
    books.deliver("t", 0, "b")
    books.needed()
    books.ledger.fail("t", EncodeError("x"), 0.0)
    assert books.kept == "b"
    assert books.needed() == []


def seen_before(letters: str) -> Books:
    """Requests went on with these, and nothing of them is kept."""
    books = keeping(kept_pages=0)
    for letter in letters:
        ticket = f"before {letter}"
        books.claim(books.expect(ticket), letter, prefix=True)
        books.deliver(ticket, 0, letter)
    for landed in books.settled():
        books.drop(*landed)
    books.needed()
    return books


def test_the_layout_of_an_item_that_is_here_is_known():
    books = keeping()
    serve(books, "before", "b")
    books.ledger._see(key("a"))
    books.claim(books.expect("t", "??"), prefix=True)
    assert isinstance(books.ledger.offer(offer("t", 0, "a"), 0.0), wire.Wait)
    assert books.ledger.offer(offer("t", 1, "b"), 0.0) == wire.Decline("t", 1, wire.DECLINE_CACHED)
    assert books.outcomes() == [wire.AskPrefix("c", (key("a"), key("b")), (LAYOUT, LAYOUT))]


@pytest.mark.parametrize("last", ["b", "c", "claim"])
def test_no_prefix_cache_is_asked_about_more_tokens_than_any_context_holds(monkeypatch, last):
    """Whatever comes last: an item that is kept, one that is offered, or the claim."""
    monkeypatch.setattr(ledger_module, "_MOST_TOKENS", 2 * ROWS)
    books = keeping()
    serve(books, "before", "b")
    books.ledger._see(key("a"))
    expect = books.expect("t", "??")
    if last != "claim":
        books.claim(expect, prefix=True)
    assert isinstance(books.ledger.offer(offer("t", 0, "a"), 0.0), wire.Wait)
    second = books.ledger.offer(offer("t", 1, "b" if last == "claim" else last), 0.0)
    assert isinstance(second, wire.Decline)
    if last == "claim":
        books.claim(expect, prefix=True)
    (outcome,) = books.outcomes()
    assert (outcome.code, outcome.items) == ("MediaTooLargeError", ())
    late = books.ledger.offer(offer("t", 0, "a"), 0.0)
    assert late == wire.Decline("t", 0, wire.DECLINE_CANCELLED)


def test_nobody_waits_long_for_a_prefix_cache_nor_where_there_is_none():
    books = seen_before("a")
    books.expect("t", "??")
    first, second = offer("t", 0, "a"), offer("t", 1, "a")
    assert isinstance(books.ledger.offer(first, 0.0), wire.Wait)
    books.ledger.take_stirred()
    books.ledger.expire(0.6)
    assert "t" in books.ledger.take_stirred()
    assert isinstance(books.ledger.offer(first, 0.6), Block)
    assert isinstance(books.ledger.offer(second, 0.6), Block), "asked no more"
    books = seen_before("a")
    books.claim(books.expect("t"), prefix=True)
    assert isinstance(books.ledger.offer(first, 0.0), wire.Wait)
    assert isinstance(books.ledger.offer(first, 4.0), wire.Wait), "it may be in a forward pass"
    books.ledger.expire(6.0)
    assert isinstance(books.ledger.offer(first, 6.0), Block), "the scheduler is long in coming"
    books = keeping(kept_pages=0)
    for ticket in "tu":
        books.claim(books.expect(ticket), ticket)
        books.deliver(ticket, 0, "a")


def test_a_request_that_ends_while_the_prefix_cache_is_asked_is_told_so():
    books = seen_before("a")
    expect = books.expect()
    books.claim(expect, prefix=True)
    books.ledger.offer(offer(letter="a"), 0.0)
    (asked,) = books.outcomes()
    assert isinstance(asked, wire.AskPrefix)
    books.ledger.cancel("t", 0.0)
    books.claim(expect, "d", covered=(0,))
    assert books.outcomes()[0].code == "RequestCancelledError"
    check_ledger(books.ledger)


def test_items_are_handed_out_before_the_others_are_here_and_again_with_them():
    books = Books()
    expect = books.expect("t", "???")
    claim = wire.Claim("c", expect, 0, READERS, early=True)
    books.ledger.claim(SCHEDULER, claim, 0.0)
    books.deliver("t", 1, "b")
    books.deliver("t", 0, "a")
    arrived = [wire.Arrived("c", number, LAYOUT.tokens) for number in (1, 0)]
    assert books.outcomes() == arrived, "each once"
    books.ledger.hand_part(SCHEDULER, wire.TakePart("t", "c", "p", (1,)))
    ((none, part, none_either),) = books.settled()
    assert (none, none_either) == (None, None)
    assert part.key == key("b")
    books.drop(part)
    assert not books.reservations.freed, "its request has yet to come"
    books.deliver("t", 2, "c")
    (items,) = books.settled()
    assert [item.key for item in items] == [key("a"), key("b"), key("c")]
    books.drop(*items)
    assert len(books.reservations) == 0
    check_ledger(books.ledger)


def test_a_part_in_use_keeps_its_items_from_others_after_its_request_has_failed():
    books = Books()
    claim = wire.Claim("c", books.expect("t", "??"), 0, READERS, early=True)
    books.ledger.claim(SCHEDULER, claim, 0.0)
    books.deliver("t", 0, "a")
    books.ledger.hand_part(SCHEDULER, wire.TakePart("t", "c", "p", (0,)))
    _, settled = books.outcomes()
    books.ledger.fail("t", EncodeError("no"), 0.0)
    assert len(books.reservations) == 1
    books.drop(*filter(None, settled.items))
    assert len(books.reservations) == 0


def begun_claim() -> tuple[Books, Block]:
    """An early claim of two items, with one row of the first."""
    books = Books()
    claim = wire.Claim("c", books.expect("t", "??"), 0, READERS, early=True)
    books.ledger.claim(SCHEDULER, claim, 0.0)
    block = books.grant("t", 0, "a", landing="shared", pages=ROWS)
    books.begin(block, 1)
    return books, block


def take_begun(books: Books, begun: int = 0) -> wire.Settled:
    books.ledger.hand_part(SCHEDULER, wire.TakePart("t", "c", "p", (0,), begun))
    *_, settled = books.outcomes()
    assert settled.claim == "p"
    return settled


def test_the_first_rows_of_an_item_are_told_of_and_handed_out_before_the_others_are_here():
    books, block = begun_claim()
    assert books.outcomes() == [wire.Arrived("c", 0, 1, whole=False)]
    (first, _) = take_begun(books).items
    assert (first.slot, first.offset, first.nbytes) == (block.slot, block.offset, PAGE)
    assert take_begun(books, -1).code == "RequestCancelledError", "all of it was asked for"
    books.begin(block, 3)
    assert books.outcomes() == [wire.Arrived("c", 0, 3, whole=False)]
    books.fill(block)
    assert books.outcomes() == [wire.Arrived("c", 0, ROWS)]
    (whole, _) = take_begun(books).items
    assert whole.nbytes == block.nbytes
    books.deliver("t", 1, "b")
    (items,) = books.settled()
    books.drop(whole, *items)
    assert len(books.reservations) == 1, "its first rows are read"
    books.drop(first)
    assert len(books.reservations) == 0
    check_ledger(books.ledger)


@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_rows_that_are_no_more_than_before_or_all_are_refused(rows):
    books, block = begun_claim()
    with pytest.raises(ProtocolError):
        books.begin(block, rows)


def test_half_a_row_is_refused():
    books, block = begun_claim()
    message = wire.Payload(*block.name, PAGE * 3 // 2, last=False)
    with pytest.raises(ProtocolError):
        books.ledger.begin(message)


@pytest.mark.parametrize("how", ["withdrawn", "replaced", "failed"])
def test_rows_of_an_item_that_never_was_whole_are_nobody_elses_while_they_are_read(how):
    """The encoder of another try writes elsewhere, from the beginning."""
    books, block = begun_claim()
    (first, _) = take_begun(books).items
    if how == "withdrawn":
        books.ledger.withdraw(wire.Withdraw(*block.name))
    elif how == "replaced":
        again = books.grant("t", 0, "a", pages=ROWS)
        assert again.offset != block.offset
        assert take_begun(books).code == "RequestCancelledError", "none of its rows is here"
        books.ledger.withdraw(wire.Withdraw(*again.name))
    else:
        books.ledger.fail("t", EncodeError("no"), 0.0)
    books.reservations.settle_late(block.grant, "t")
    assert len(books.reservations) == 1
    assert books.kept == "", "nobody finds it by its key"
    books.drop(first)
    assert len(books.reservations) == 0
    check_ledger(books.ledger)


def test_an_item_that_became_whole_is_nobody_elses_while_its_first_rows_are_read():
    books, block = begun_claim()
    (first, _) = take_begun(books).items
    books.fill(block)
    books.ledger.fail("t", EncodeError("no"), 0.0)
    assert len(books.reservations) == 1
    books.drop(first)
    assert len(books.reservations) == 0


@pytest.mark.parametrize(
    ("ticket", "claim", "items"), [("u", "c", (0,)), ("t", "d", (0,)), ("t", "c", (0, 1))]
)
def test_a_part_of_what_is_not_here_is_refused(ticket, claim, items):
    books = Books()
    early = wire.Claim("c", books.expect("t", "??"), 0, READERS, early=True)
    books.ledger.claim(SCHEDULER, early, 0.0)
    books.deliver("t", 0, "a")
    books.outcomes()
    books.ledger.hand_part(SCHEDULER, wire.TakePart(ticket, claim, "p", items))
    (refused,) = books.outcomes()
    assert (refused.claim, refused.items) == ("p", ())
    assert refused.code == "RequestCancelledError"


def early_claim(books: Books, expect: wire.Expect, name: str = "c") -> None:
    claim = wire.Claim(name, expect, 0, READERS, prefix=name == "c", early=True)
    books.ledger.claim(SCHEDULER, claim, 0.0)


def test_a_claim_that_follows_another_is_told_of_what_was_here_before_it():
    books = keeping()
    serve(books, "before", "a")
    books.ledger._see(key("b"))
    expect = books.expect("t", "??")
    early_claim(books, expect)
    books.ledger.offer(offer("t", 0, "a"), 0.0)
    assert books.outcomes() == [wire.Arrived("c", 0, LAYOUT.tokens)]
    books.ledger.offer(offer("t", 1, "b"), 0.0)
    assert [type(outcome) for outcome in books.outcomes()] == [wire.AskPrefix]
    early_claim(books, expect, "d")
    assert books.outcomes() == [wire.Arrived("d", 0, LAYOUT.tokens)]


def test_a_claim_is_told_whether_another_encoder_is_to_send_an_item_of_it():
    books = Books()
    expect = books.expect("t", "?????")
    books.grant("t", 3, "d", peer=b"third")  # before it was known that it is covered
    books.ledger.claim(SCHEDULER, wire.Claim("c", expect, 0, READERS, (3,), early=True), 0.0)
    peers = {0: b"one", 1: b"one", 2: b"other", 4: b"one"}
    blocks = {item: books.grant("t", item, "abcde"[item], peer=peers[item]) for item in peers}
    for item, elsewhere in [(0, True), (2, True), (1, False)]:
        books.fill(blocks[item])
        told = wire.Arrived("c", item, LAYOUT.tokens, elsewhere=elsewhere)
        assert books.outcomes() == [told]


def test_an_item_that_had_to_make_room_is_told_of_again_when_it_is_back():
    books = keeping()
    serve(books, "before", "a")
    early_claim(books, books.expect("t", "a?"))
    assert books.outcomes() == [wire.Arrived("c", 0, LAYOUT.tokens)]
    books.claim(books.expect("u"), "u")
    large = books.deliver("u", 0, "u", pages=PAGES)
    assert books.kept == "", "it made room"
    books.outcomes()
    books.drop(wire.Landed(key("u"), LAYOUT, large.nbytes, large.slot, large.offset))
    books.deliver("t", 0, "a")
    assert books.outcomes() == [wire.Arrived("c", 0, LAYOUT.tokens)]


@dataclass
class Told:
    """The model of a request: what it was announced as, and what came of it since."""

    expect: wire.Expect
    letters: str
    # What its tokenizer was told to have encoded and has not delivered.
    wanted: set[int]
    # What a claim has not covered; of layouts that are known nothing, before the first claim.
    needs: set[int]
    decided: bool
    known: set[int] = field(default_factory=set)
    # Since when an item that was here before waits, and since when its claimant is asked.
    since: float | None = None
    asked: float | None = None
    closed: bool = False
    claim: wire.Claim | None = None
    # Items that its claimant was told of before the others.
    arrived: set[int] = field(default_factory=set)

    def hopes(self, now: float) -> bool:
        """Whether an offer of an item that was here before waits."""
        if self.closed or self.since is None:
            return False
        return now < (self.since + LAYOUTS_S if self.asked is None else self.asked + PREFIX_S)


class KeptMachine(RuleBasedStateMachine):
    """Requests of few items over a small memory, in any order: what they get is theirs,
    and every byte comes back."""

    @initialize(kept_pages=st.sampled_from((0, 5)), before=st.sets(st.sampled_from("abc")))
    def begin(self, kept_pages: int, before: set[str]) -> None:
        self.kept_pages = kept_pages
        self.books = Books(kept_pages=kept_pages)
        self.ledger = self.books.ledger
        self.now = 0.0
        self.names = itertools.count()
        self.open: dict[str, Told] = {}
        self.reading: list[tuple[wire.Landed | None, ...]] = []
        self.contents: dict[int, bytes] = {}
        # By name: the ticket, the claim, and the items that were asked for.
        self.parts: dict[str, tuple[str, str, set[int]]] = {}
        for letter in sorted(before):
            self.ledger._see(key(letter))

    def claimed(self) -> dict[str, str]:
        claims = ((told.claim, ticket) for ticket, told in self.open.items())
        return {claim.claim: ticket for claim, ticket in claims if claim is not None}

    def look(self) -> None:
        ended = set()
        for needed in self.books.needed():
            if needed.over:
                ended.add(needed.ticket)
            elif needed.ticket in self.open:
                told = self.open[needed.ticket]
                items = set(needed.items)
                assert told.decided and items <= told.needs, "nobody needs it"
                assert not told.wanted & items, "it was asked for before"
                told.wanted |= items
        for outcome in self.books.outcomes():
            if isinstance(outcome, wire.Arrived) or outcome.claim in self.parts:
                self.look_early(outcome)
                continue
            ticket = self.claimed()[outcome.claim]
            told = self.open[ticket]
            if isinstance(outcome, wire.AskPrefix):
                assert self.may_ask(ticket), "asked without need, too late, or twice"
                assert outcome.keys == tuple(map(key, told.letters))
                assert outcome.layouts == (LAYOUT,) * len(told.letters)
                told.asked, told.claim = self.now, None
                continue
            del self.open[ticket]
            if not outcome.code:
                covered = told.claim.covered
                expected = [
                    None if number in covered else key(one)
                    for number, one in enumerate(told.letters)
                ]
                assert [item and item.key for item in outcome.items] == expected
                for item in filter(None, outcome.items):
                    assert self.contents[item.offset] == item.key, "somebody else's bytes"
                self.reading.append(tuple(filter(None, outcome.items)))
        for ticket in ended & self.open.keys():
            assert self.open[ticket].claim is None, "a claim ended without a word"
            del self.open[ticket]
        for ticket in self.open:
            assert not self.may_ask(ticket), "its prefix cache should have been asked"

    def look_early(self, outcome: wire.Arrived | wire.Settled) -> None:
        """Word of an item, or items, before the others are here."""
        if isinstance(outcome, wire.Arrived):
            told = self.open[self.claimed()[outcome.claim]]
            assert outcome.item not in told.claim.covered
            assert outcome.tokens == LAYOUT.tokens
            told.arrived.add(outcome.item)
            return
        ticket, claim, items = self.parts.pop(outcome.claim)
        told = self.open.get(ticket)
        if outcome.code:
            assert not outcome.items
            gone = told is None or told.claim is None or told.claim.claim != claim
            here = set() if gone else self.here(ticket)
            assert not items <= here, "they are here"
            return
        keys = [key(one) if number in items else None for number, one in enumerate(told.letters)]
        assert [item and item.key for item in outcome.items] == keys
        self.reading.append(tuple(filter(None, outcome.items)))

    def here(self, ticket: str) -> set[int]:
        every = enumerate(self.ledger._entries[ticket].items)
        return {number for number, item in every if item.here}

    @precondition(lambda self: any(told.arrived for told in self.open.values()))
    @rule(data=st.data(), over=st.sampled_from((False, False, True)))
    def take_part(self, data: st.DataObject, over: bool) -> None:
        """Some of the items that it was told of; they may have had to make room since."""
        early = sorted(ticket for ticket, told in self.open.items() if told.arrived and told.claim)
        if not early:
            return
        ticket = data.draw(st.sampled_from(early))
        told = self.open[ticket]
        items = data.draw(st.sets(st.sampled_from(sorted(told.arrived)), min_size=1))
        claim = "another" if over else told.claim.claim
        name = f"p{next(self.names)}"
        self.parts[name] = ticket, claim, items
        part = wire.TakePart(ticket, claim, name, tuple(sorted(items)))
        self.ledger.hand_part(SCHEDULER, part)
        assert name in self.parts
        self.look()
        assert name not in self.parts, "it is not answered"

    def may_ask(self, ticket: str) -> bool:
        """Whether its claimant is to look into its prefix cache, now."""
        told = self.open[ticket]
        items = self.ledger._entries[ticket].items
        cached = {n for n, item in enumerate(items) if item.state is ItemState.CACHED}
        complete = len(told.known | cached) == len(items)
        waits = told.since is not None and told.asked is None and not told.closed
        return bool(waits and complete and told.claim is not None and told.claim.prefix)

    @rule(
        letters=st.text("abcd", min_size=1, max_size=3),
        known=st.sampled_from(("nothing", "nothing", "keys", "layouts")),
    )
    def announce(self, letters: str, known: str) -> None:
        ticket = f"t{next(self.names)}"
        every = set(range(len(letters)))
        laid_out = known == "layouts"
        keys = tuple(b"" if known == "nothing" else key(letter) for letter in letters)
        expect = wire.Expect(
            ticket, len(letters), 100.0, keys, (LAYOUT,) * len(letters) if laid_out else ()
        )
        wanted = every if known == "nothing" else set()
        self.open[ticket] = Told(
            expect, letters, set(wanted), set() if laid_out else every, not laid_out
        )
        self.ledger.expect(expect, self.now, watcher=TOKENIZER)
        self.look()

    @precondition(lambda self: any(told.claim is None for told in self.open.values()))
    @rule(data=st.data(), prefix=st.sampled_from((True, True, False)))
    def claim(self, data: st.DataObject, prefix: bool) -> None:
        unclaimed = sorted(ticket for ticket, told in self.open.items() if told.claim is None)
        ticket = data.draw(st.sampled_from(unclaimed))
        told = self.open[ticket]
        numbers = st.integers(0, len(told.letters) - 1)
        asked = told.asked is not None and not told.closed
        looked = asked or not told.decided
        covered = data.draw(st.sets(numbers, min_size=int(asked))) if looked else set()
        needs = set(range(len(told.letters))) - covered
        told.needs = needs if asked else told.needs | needs
        told.decided, told.closed = True, told.closed or looked
        name = f"c{next(self.names)}"
        told.arrived.clear()
        told.claim = wire.Claim(
            name, told.expect, 0, READERS, tuple(sorted(covered)), prefix, early=True
        )
        self.ledger.claim(SCHEDULER, told.claim, self.now)
        self.look()
        for item in covered if ticket in self.open else ():
            self.offer(ticket, item)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), anything=st.booleans())
    def deliver(self, data: st.DataObject, anything: bool) -> None:
        """An encoder offers what it was asked for; now and then what it was not."""
        offers = [
            (ticket, number)
            for ticket, told in sorted(self.open.items())
            for number in (range(len(told.letters)) if anything else sorted(told.wanted))
        ]
        if offers:
            self.offer(*data.draw(st.sampled_from(offers)))

    def offer(self, ticket: str, item: int) -> None:
        told = self.open[ticket]
        letter = told.letters[item]
        entry = self.ledger._entries[ticket]
        seen = key(letter) in self.ledger._seen
        planned = entry.items[item].state is ItemState.PLANNED
        needless = planned and told.decided and item not in told.needs
        # One key has one size.
        asked = offer(ticket, item, letter, pages=1 + ord(letter) % 2)
        answer = self.ledger.offer(asked, self.now)
        covered = wire.Decline(ticket, item, wire.DECLINE_COVERED)
        assert (answer == covered) == needless, "somebody needs it, or nobody"
        if not isinstance(answer, wire.Decline):
            told.known.add(item)
            if told.since is None and not told.closed and seen and told.decided:
                told.since = self.now
            hopes = seen and (told.hopes(self.now) or self.may_ask(ticket))
            assert isinstance(answer, wire.Wait) or not hopes, "the prefix cache may have it"
            assert hopes or isinstance(answer, Block) or item in entry.waiting
        if isinstance(answer, Block):
            self.contents[answer.offset] = key(letter)
            self.books.fill(answer)
        if not isinstance(answer, wire.Wait):
            told.wanted.discard(item)
        self.look()

    @rule(seconds=st.sampled_from((0.1, 0.2, 0.5, 2.0, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.take_stirred()
        overdue = [
            told
            for told in self.open.values()
            if told.since is not None and not told.closed and not told.hopes(self.now)
        ]
        self.ledger.expire(self.now)
        for told in overdue:
            # Its claimant may answer yet, where it was asked.
            told.closed = told.asked is None
        if any(told.asked is None or told.closed for told in overdue):
            assert self.ledger.take_stirred(), "offers that waited are not looked at again"
        self.look()
        for ticket in [ticket for ticket, told in self.open.items() if told.asked is not None]:
            for item in sorted(self.open[ticket].wanted) if ticket in self.open else ():
                self.offer(ticket, item)

    @precondition(lambda self: len(self.open) > 2)
    @rule(data=st.data(), how=st.sampled_from(("fail", "cancel", "abandon")))
    def end(self, data: st.DataObject, how: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        claim = self.open[ticket].claim
        if how == "fail":
            self.ledger.fail(ticket, EncodeError("no"), self.now)
        if how == "cancel" or claim is None:
            self.ledger.cancel(ticket, self.now)
        elif how == "abandon":
            self.ledger.abandon(SCHEDULER, claim.claim, self.now)
        self.look()
        assert ticket not in self.open

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.books.drop(*self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))
        self.look()

    @invariant()
    def the_books_add_up(self) -> None:
        check_ledger(self.ledger)
        assert self.ledger._entries.keys() == self.open.keys()
        assert self.books.reservations.kept_bytes <= self.kept_pages * PAGE

    @invariant()
    def an_early_claim_knows_what_is_here(self) -> None:
        for ticket, told in self.open.items():
            if told.claim is not None:
                assert self.here(ticket) - set(told.claim.covered) <= told.arrived

    @invariant()
    def what_is_not_here_was_asked_for(self) -> None:
        for told in self.open.values():
            if told.claim is not None:
                assert told.wanted, "a request waits for what nobody was told to send"

    def teardown(self) -> None:
        for ticket in list(self.open):
            self.ledger.cancel(ticket, self.now)
        self.books.outcomes()
        for items in self.reading:
            self.books.drop(*items)
        self.books.reservations.reclaim(self.now)
        assert len(self.books.reservations) == 0
        assert self.books.reservations.held_bytes == 0, "bytes leaked"
        check_ledger(self.ledger)


TestKept = KeptMachine.TestCase
TestKept.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=40, deadline=None
)
