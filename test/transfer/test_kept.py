"""What a receiver keeps of embeddings, and what requests make of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
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

from sglang_epd.errors import EncodeError
from sglang_epd.tally import Tally
from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.entries import ItemState
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.ledger import _LAYOUTS_S as LAYOUTS_S
from sglang_epd.transfer.ledger import _PREFIX_S as PREFIX_S
from sglang_epd.transfer.ledger import Ledger
from sglang_epd.transfer.reservations import Reservations
from sglang_epd.wire import messages as wire

PAGE = ALIGNMENT
PAGES = 8
SLOTS = 16
READERS = 2
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (1, 4)), [[1, 2, 2]])


def key(letter: str) -> bytes:
    return letter.encode() * 32


class Books:
    """A ledger that keeps embeddings, and readers that drop what they are told to."""

    def __init__(self, kept_pages: int = PAGES, pages: int = PAGES) -> None:
        self.drops = np.zeros((SLOTS, READERS), np.uint32)
        self.reservations = Reservations(
            pages * PAGE,
            SLOTS,
            READERS,
            drops=lambda slots: self.drops[slots],
            reset=self._reset,
            writer_lives=lambda _process: None,
            kept_bytes=kept_pages * PAGE,
        )
        self.tally = Tally()
        self.ledger = Ledger(self.reservations, 60.0, self.tally)
        self.names = itertools.count()

    def _reset(self, slot: int) -> None:
        self.drops[slot] = 0

    def expect(self, ticket: str, letters: str, consumers: int = 1) -> wire.Expect:
        """Announce a request; "?" is an item whose key is not known."""
        keys = tuple(b"" if letter == "?" else key(letter) for letter in letters)
        message = wire.Expect(ticket, len(letters), consumers, 100.0, keys)
        self.ledger.expect(message, 0.0, watcher=b"tokenizer")
        return message

    def needed(self) -> list[tuple[str, tuple[int, ...], bool]]:
        messages = [notice.message for notice in self.ledger.take_notices()]
        return [(message.ticket, message.items, message.over) for message in messages]

    def offer(self, ticket: str, item: int, letter: str, pages: int = 1) -> object:
        return self.ledger.offer(wire.Offer(ticket, item, key(letter), LAYOUT, pages * PAGE), 0.0)

    def deliver(self, ticket: str, item: int, letter: str, pages: int = 1) -> Block:
        block = self.offer(ticket, item, letter, pages)
        assert isinstance(block, Block), block
        assert self.ledger.fill(wire.Payload(ticket, item, block.grant), 0.0)
        return block

    def claim(self, expect: wire.Expect) -> list[tuple[wire.Landed, ...]]:
        """Claim it; what has settled since the last time."""
        self.ledger.claim(next(self.names), wire.Claim("c", expect, 0, READERS), 0.0)
        return self.settled()

    def settled(self) -> list[tuple[wire.Landed, ...]]:
        outcomes = self.ledger.take_outcomes()
        assert not any(outcome.error for outcome in outcomes), outcomes
        return [outcome.items for outcome in outcomes]

    def drop(self, *items: wire.Landed) -> None:
        """Every reader drops these, and the receiver looks after them."""
        for item in items:
            self.drops[item.slot] += 1
        self.ledger.reservations.reclaim(0.0)

    def serve(self, ticket: str, letters: str) -> None:
        """A request from its beginning to its end."""
        expect = self.expect(ticket, letters)
        for whose, items, _ in self.needed():
            for item in items if whose == ticket else ():
                self.deliver(ticket, item, letters[item])
        (landed,) = self.claim(expect)
        assert [item.key for item in landed] == [key(letter) for letter in letters]
        self.drop(*landed)
        self.needed()
        self.ledger.check_integrity()

    @property
    def kept(self) -> str:
        """The keys of what is kept and not in use."""
        blocks = self.reservations._blocks.values()
        return "".join(
            sorted(chr(block.key[0]) for block in blocks if block.state is BlockState.KEPT)
        )


def test_what_is_here_is_not_needed_again():
    books = Books()
    books.serve("t", "ab")
    assert books.kept == "ab"
    expect = books.expect("u", "abc")
    assert books.needed() == [("u", (2,), False)]
    assert not books.claim(expect)
    books.deliver("u", 2, "c")
    (landed,) = books.settled()
    assert [item.key for item in landed] == [key(letter) for letter in "abc"]
    assert books.needed() == [("u", (), True)]
    books.drop(*landed)
    assert books.kept == "abc"
    assert books.tally.counts["hits", "expected"] == 2


def test_it_is_found_while_others_hold_or_read_it_and_stays_until_all_have_dropped_it():
    books = Books()
    first = books.expect("t", "a", consumers=2)
    books.deliver("t", 0, "a")
    (early,) = books.claim(books.expect("u", "a"))
    books.drop(*early)
    assert not books.kept, "its own request is not through with it"
    (one,), (two,) = books.claim(first), books.claim(first)
    assert one == two == early
    books.drop(*one)
    (late,) = books.claim(books.expect("v", "a"))
    assert late == one
    books.drop(*two)
    assert not books.kept
    books.drop(*late)
    assert books.kept == "a"
    books.ledger.check_integrity()


def test_an_offer_of_what_is_here_is_declined_and_needs_no_bytes():
    books = Books()
    expect = books.expect("u", "?")
    books.serve("t", "a")
    assert books.offer("u", 0, "a") == wire.Decline("u", 0, wire.DECLINE_CACHED)
    assert books.offer("u", 0, "a") == wire.Decline("u", 0, wire.DECLINE_CACHED)
    (landed,) = books.claim(expect)
    assert landed[0].key == key("a")
    assert books.tally.counts["grants", ""] == 1


def test_an_offer_that_waits_is_declined_when_another_request_has_received_the_same():
    books = Books(pages=2)
    books.expect("t", "a")
    books.offer("t", 0, "a", pages=2)
    waiting = books.expect("u", "?")
    assert isinstance(books.offer("u", 0, "a", pages=2), wire.Wait)
    before = books.ledger.news
    block = next(iter(books.reservations._blocks.values()))
    books.ledger.fill(wire.Payload("t", 0, block.grant), 0.0)
    assert books.ledger.news > before, "the receiver asks again"
    assert books.offer("u", 0, "a", pages=2) == wire.Decline("u", 0, wire.DECLINE_CACHED)
    assert books.claim(waiting)
    books.ledger.check_integrity()


def test_what_is_kept_makes_room_least_recently_used_first():
    books = Books()
    for number, letter in enumerate("abcdefgh"):
        books.serve(f"t{number}", letter)
    books.serve("again", "a")
    books.expect("u", "?")
    books.deliver("u", 0, "x", pages=3)
    assert books.kept == "aefgh", "three had to go, and not the one that was just used"
    assert books.tally.counts["evictions", ""] == 3
    books.ledger.check_integrity()


def test_what_had_to_make_room_before_it_was_used_is_needed_after_all():
    books = Books(pages=2)
    books.serve("t", "a")
    relying = books.expect("u", "a")
    assert books.needed() == [("u", (), False)], "nothing is needed"
    other = books.expect("v", "?")
    books.deliver("v", 0, "x", pages=2)
    assert ("u", (0,), False) in books.needed()
    assert not books.claim(relying)
    books.drop(*books.claim(other)[0])
    books.deliver("u", 0, "a")
    assert books.settled()
    books.ledger.check_integrity()


def test_nothing_is_kept_without_a_capacity_and_no_more_than_it():
    books = Books(kept_pages=0)
    books.serve("t", "a")
    assert (books.kept, books.reservations.held_bytes) == ("", 0)
    assert books.reservations.find(key("a")) is None
    books = Books(kept_pages=2)
    books.serve("t", "abc")
    assert books.reservations.kept_bytes == 2 * PAGE
    books.expect("u", "?")
    books.deliver("u", 0, "y", pages=3)
    books.ledger.fail("u", EncodeError("no"), 0.0)
    assert "y" not in books.kept, "larger than all that may be kept"


def test_a_key_that_is_not_the_items_own_is_not_found_by_others():
    books = Books()
    expect = books.expect("t", "a")
    books.deliver("t", 0, "b")
    books.claim(expect)
    assert books.reservations.find(key("a")) is None
    assert books.reservations.find(key("b")) is None
    books.serve("u", "c")
    books.expect("v", "a")
    assert isinstance(books.offer("v", 0, "c"), Block), "nor is it given to it"


def test_a_request_that_ended_needs_nothing():
    books = Books()
    books.ledger.fail("t", EncodeError("no"), 0.0)
    books.expect("t", "a")
    assert books.needed() == [("t", (), True)]


def test_a_claim_may_come_before_the_announcement():
    books = Books()
    books.serve("t", "a")
    expect = wire.Expect("u", 2, 1, 100.0, (key("a"), key("b")))
    assert not books.claim(expect)
    assert not books.needed()
    books.expect("u", "ab")
    assert books.needed() == [("u", (1,), False)]


def test_a_claim_that_overtakes_the_announcement_takes_no_count_along():
    """All of a request may be here, and its claim settled, before its tokenizer is heard."""
    ends = []
    for claim_first in (False, True):
        books = Books()
        books.serve("t", "ac")
        keys = (key("a"), key("b"), key("c"))
        expect = wire.Expect("u", 3, 1, 100.0, keys, (LAYOUT,) * 3)
        claim = wire.Claim("c", expect, 0, READERS, covered=(1,))
        steps = [
            lambda books=books, expect=expect: books.ledger.expect(expect, 0.0, watcher=b"it"),
            lambda books=books, claim=claim: books.ledger.claim("c", claim, 0.0),
        ]
        for step in reversed(steps) if claim_first else steps:
            step()
        ends.append(books.ledger.take_notices()[-1].message)
    assert ends == [wire.Needed("u", over=True, covered=1, cached=2)] * 2


def asks_the_prefix_cache(books: Books, ticket: str, letters: str) -> wire.Expect:
    keys = tuple(key(letter) for letter in letters)
    expect = wire.Expect(ticket, len(letters), 1, 100.0, keys, (LAYOUT,) * len(letters))
    books.ledger.expect(expect, 0.0, watcher=b"tokenizer")
    return expect


def test_nothing_is_needed_before_the_prefix_cache_was_asked():
    books = Books()
    books.serve("t", "a")
    expect = asks_the_prefix_cache(books, "u", "abc")
    assert not books.needed()
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, covered=(1,)), 0.0)
    assert books.needed() == [("u", (2,), False)]
    books.deliver("u", 2, "c")
    (landed,) = books.settled()
    assert [item and item.key for item in landed] == [key("a"), None, key("c")]
    (over,) = books.ledger.take_notices()
    assert over.message == wire.Needed("u", over=True, covered=1, cached=1)
    books.drop(landed[0], landed[2])
    assert books.reservations.held_bytes == 0


def test_what_the_prefix_cache_covers_is_neither_sent_nor_held():
    books = Books()
    books.serve("t", "ab")
    expect = asks_the_prefix_cache(books, "u", "ab")
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, covered=(0, 1)), 0.0)
    assert books.settled() == [(None, None)]
    assert books.kept == "ab"
    assert len(books.ledger) == 0


def test_samples_may_be_covered_differently():
    books = Books()
    keys = (key("a"), key("b"))
    expect = wire.Expect("t", 2, 3, 100.0, keys, (LAYOUT, LAYOUT))
    books.ledger.expect(expect, 0.0, watcher=b"tokenizer")
    books.ledger.claim("one", wire.Claim("one", expect, 0, READERS, covered=(0, 1)), 0.0)
    assert books.settled() == [(None, None)]
    assert books.needed() == [("t", (), False)]
    books.ledger.claim("two", wire.Claim("two", expect, 0, READERS, covered=(0,)), 0.0)
    books.ledger.claim("three", wire.Claim("three", expect, 0, READERS), 0.0)
    assert books.needed() == [("t", (1,), False), ("t", (0,), False)]
    books.deliver("t", 1, "b")
    assert [[bool(item) for item in landed] for landed in books.settled()] == [[False, True]]
    books.ledger.check_integrity()
    books.deliver("t", 0, "a")
    assert [[bool(item) for item in landed] for landed in books.settled()] == [[True, True]]
    assert len(books.ledger) == 0


def offered(books: Books, ticket: str, item: int, letter: str, now: float = 0.0) -> object:
    return books.ledger.offer(wire.Offer(ticket, item, key(letter), LAYOUT, PAGE), now)


def seen_before(letters: str) -> Books:
    """Requests went on with these, and nothing of them is kept."""
    books = Books(kept_pages=0)
    for letter in letters:
        expect = books.expect(f"before {letter}", "?")
        claim = wire.Claim("c", expect, 0, READERS, prefix=True)
        books.ledger.claim(letter, claim, 0.0)
        books.deliver(f"before {letter}", 0, letter)
    for landed in books.settled():
        books.drop(*landed)
    books.needed()
    return books


def test_an_item_that_was_here_before_waits_for_the_prefix_cache_and_may_be_covered():
    books = seen_before("a")
    expect = books.expect("t", "??")
    books.needed()
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, prefix=True), 0.0)
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    assert not books.ledger.take_outcomes(), "the other item is not known"
    block = offered(books, "t", 1, "b")
    assert isinstance(block, Block), "it was never here, and waits for nothing"
    (outcome,) = books.ledger.take_outcomes()
    assert (outcome.claimant, outcome.laid) == ("c", ((key("a"), LAYOUT), (key("b"), LAYOUT)))
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    before = books.ledger.news
    again = wire.Claim("d", expect, 0, READERS, covered=(0,), prefix=True)
    books.ledger.claim("d", again, 0.0)
    assert books.ledger.news > before
    assert offered(books, "t", 0, "a") == wire.Decline("t", 0, wire.DECLINE_COVERED)
    assert books.ledger.fill(wire.Payload("t", 1, block.grant), 0.0)
    (landed,) = books.settled()
    assert [bool(item) for item in landed] == [False, True]
    books.drop(landed[1])
    books.ledger.check_integrity()
    assert books.reservations.held_bytes == 0


def test_the_layout_of_an_item_that_is_here_is_known():
    books = Books()
    books.serve("before", "b")
    books.ledger._see(key("a"))
    expect = books.expect("t", "??")
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, prefix=True), 0.0)
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    assert offered(books, "t", 1, "b") == wire.Decline("t", 1, wire.DECLINE_CACHED)
    (outcome,) = books.ledger.take_outcomes()
    assert outcome.laid == ((key("a"), LAYOUT), (key("b"), LAYOUT))


def test_a_claim_may_come_after_the_offers():
    books = seen_before("a")
    expect = books.expect("t", "?")
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, prefix=True), 0.0)
    (outcome,) = books.ledger.take_outcomes()
    assert outcome.laid
    books.ledger.claim("d", wire.Claim("d", expect, 0, READERS, covered=(0,)), 0.0)
    assert books.settled() == [(None,)]
    assert isinstance(offered(books, "t", 0, "a"), wire.Decline)


def test_nobody_waits_long_for_a_prefix_cache_nor_where_there_is_none():
    books = seen_before("a")
    books.expect("t", "??")
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    before = books.ledger.news
    books.ledger.expire(0.6)
    assert books.ledger.news > before
    assert isinstance(offered(books, "t", 0, "a", 0.6), Block)
    assert isinstance(offered(books, "t", 1, "a", 0.6), Block), "asked no more"
    books = seen_before("a")
    expect = books.expect("t", "?")
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, prefix=True), 0.0)
    assert isinstance(offered(books, "t", 0, "a"), wire.Wait)
    assert isinstance(offered(books, "t", 0, "a", 4.0), wire.Wait), "it may be in a forward pass"
    books.ledger.expire(6.0)
    assert isinstance(offered(books, "t", 0, "a", 6.0), Block), "the scheduler is long in coming"
    books = Books(kept_pages=0)
    for ticket in "tu":
        expect = books.expect(ticket, "?")
        books.ledger.claim(ticket, wire.Claim("c", expect, 0, READERS), 0.0)
        books.deliver(ticket, 0, "a")


def test_a_request_that_ends_while_the_prefix_cache_is_asked_is_told_so():
    books = seen_before("a")
    expect = books.expect("t", "?")
    books.ledger.claim("c", wire.Claim("c", expect, 0, READERS, prefix=True), 0.0)
    offered(books, "t", 0, "a")
    assert books.ledger.take_outcomes()
    books.ledger.cancel("t", 0.0)
    books.ledger.claim("d", wire.Claim("d", expect, 0, READERS, covered=(0,)), 0.0)
    (outcome,) = books.ledger.take_outcomes()
    assert outcome.error is not None
    books.ledger.check_integrity()


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
        self.books = Books(kept_pages)
        self.ledger = self.books.ledger
        self.now = 0.0
        self.names = itertools.count()
        self.open: dict[str, Told] = {}
        self.reading: list[tuple[wire.Landed | None, ...]] = []
        self.contents: dict[int, bytes] = {}
        for letter in sorted(before):
            self.ledger._see(key(letter))

    def claimed(self) -> dict[str, str]:
        claims = ((told.claim, ticket) for ticket, told in self.open.items())
        return {claim.claim: ticket for claim, ticket in claims if claim is not None}

    def look(self) -> None:
        ended = set()
        for ticket, items, over in self.books.needed():
            if over:
                ended.add(ticket)
            elif ticket in self.open:
                told = self.open[ticket]
                assert told.decided and set(items) <= told.needs, "nobody needs it"
                assert not told.wanted & set(items), "it was asked for before"
                told.wanted |= set(items)
        for outcome in self.ledger.take_outcomes():
            ticket = self.claimed()[outcome.claimant]
            told = self.open[ticket]
            if outcome.laid:
                assert self.may_ask(ticket), "asked without need, too late, or twice"
                assert outcome.laid == tuple((key(one), LAYOUT) for one in told.letters)
                told.asked, told.claim = self.now, None
                continue
            del self.open[ticket]
            if outcome.error is None:
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
            ticket, len(letters), 1, 100.0, keys, (LAYOUT,) * len(letters) if laid_out else ()
        )
        wanted = every if known == "nothing" else set()
        self.open[ticket] = Told(
            expect, letters, set(wanted), set() if laid_out else every, not laid_out
        )
        self.ledger.expect(expect, self.now, watcher=b"tokenizer")
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
        told.claim = wire.Claim(name, told.expect, 0, READERS, tuple(sorted(covered)), prefix)
        self.ledger.claim(name, told.claim, self.now)
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
        offer = wire.Offer(ticket, item, key(letter), LAYOUT, (1 + ord(letter) % 2) * PAGE)
        answer = self.ledger.offer(offer, self.now)
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
            assert self.ledger.fill(wire.Payload(ticket, item, answer.grant), self.now)
        if not isinstance(answer, wire.Wait):
            told.wanted.discard(item)
        self.look()

    @rule(seconds=st.sampled_from((0.1, 0.2, 0.5, 2.0, 5.0, 20.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        before = self.ledger.news
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
            assert self.ledger.news > before, "offers that waited are not looked at again"
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
            self.ledger.abandon(claim.claim, self.now)
        self.look()
        assert ticket not in self.open

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.books.drop(*self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))
        self.look()

    @invariant()
    def the_books_add_up(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger._entries.keys() == self.open.keys()
        assert self.books.reservations.kept_bytes <= self.kept_pages * PAGE

    @invariant()
    def what_is_not_here_was_asked_for(self) -> None:
        for told in self.open.values():
            if told.claim is not None:
                assert told.wanted, "a request waits for what nobody was told to send"

    def teardown(self) -> None:
        for ticket in list(self.open):
            self.ledger.cancel(ticket, self.now)
        self.ledger.take_outcomes()
        for items in self.reading:
            self.books.drop(*items)
        self.books.reservations.reclaim(self.now)
        assert len(self.books.reservations) == 0
        assert self.books.reservations.held_bytes == 0, "bytes leaked"
        self.ledger.check_integrity()


TestKept = KeptMachine.TestCase
TestKept.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=40, deadline=None
)


def test_a_negative_capacity_is_refused():
    with pytest.raises(ValueError, match="negative"):
        Books(kept_pages=-1)
