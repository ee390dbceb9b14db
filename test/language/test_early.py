"""Which parts of a prompt are prefilled early: as much as has landed, one at a time."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_epd.language import early as early_module
from sglang_epd.language import manifest
from sglang_epd.language.backend import PART
from sglang_epd.language.early import Early, Prompt
from sglang_epd.spans import OFF
from sglang_epd.wire.messages import (
    Arrived,
    Beginning,
    Expect,
    Landed,
    Layout,
    Settled,
    TensorSpec,
)

SECRET = bytes(range(32))
ROWS = 10
LAYOUT = Layout("IMAGE", TensorSpec("float32", (ROWS, 4)), [[1, 2, 4]])
# Three texts of three ids and an item each, and a text behind. The second item of the prompt is
# the request's last one: a video, say.
PROMPT = Prompt(array("q", [1, 1, 7, 9, 1, 1, 7, 8, 1, 1, 7, 9, 1, 1]), (3, 7, 11), (0, 2, 1))
EXPECT = Expect("ticket", 3, 60.0)


class FakeClaims:
    """The control channel: what is taken has landed."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, str, tuple[int, ...]]] = []

    def take_part(
        self, ticket: str, claim: str, name: str, items: tuple[int, ...], begun: int
    ) -> None:
        self.taken.append((ticket, claim, name, items))
        self.begun = begun


class FakeParts:
    """What the rank says of its parts."""

    def __init__(self) -> None:
        self.in_flight = False
        self.smallest: int | None = 2
        self.pause = 0.0

    def alive(self, rid: str) -> bool:
        return self.in_flight

    def least(self) -> int | None:
        return self.smallest

    def pause_s(self) -> float:
        return self.pause


class World:
    def __init__(self) -> None:
        self.claims, self.parts = FakeClaims(), FakeParts()
        claims: Any = self.claims
        parts: Any = self.parts
        self.early = Early(
            claims, parts, read=lambda _request, _expect: PROMPT, make=make, secret=SECRET
        )

    def follow(self, covered: tuple[int, ...] = (), layouts: tuple[Layout, ...] = ()) -> None:
        expect = Expect("ticket", 3, 60.0, tuple(bytes(32) for _ in layouts), layouts)
        request = SimpleNamespace(rid="r")
        self.early.follow("c", request, expect, covered, prompt=PROMPT, span=OFF)

    def arrive(self, item: int, *, elsewhere: bool = False) -> None:
        assert self.early.hear(Arrived("c", item, ROWS, elsewhere=elsewhere))

    def begin(self, item: int, rows: int) -> None:
        assert self.early.hear(Arrived("c", item, rows, whole=False))

    def part(self) -> tuple[Any, Beginning]:
        """The part that begins now, its items handed out."""
        assert not self.early.take(), "its items have to be asked for"
        _, _, name, items = self.claims.taken[-1]
        landed = tuple(
            Landed(bytes([item]) * 32, LAYOUT, 32, item, 0) if item in items else None
            for item in range(3)
        )
        assert self.early.hear(Settled(name, landed))
        (part,) = self.early.take()
        return part, read(part)


def make(request: Any, rid: str, ids: array[int]) -> Any:
    return SimpleNamespace(rid=rid, input_ids=ids, encoder_urls=None)


def read(part: Any) -> Beginning:
    message = manifest.read(part.encoder_urls, SECRET)
    assert isinstance(message, Beginning)
    return message


@pytest.fixture
def world() -> World:
    return World()


def test_the_part_of_a_claim_that_gave_way_is_waited_for(world):
    """A request asks anew when all of its layouts have become known."""
    world.parts.in_flight = True
    world.follow()
    world.arrive(0)
    assert not world.early.take()
    assert not world.claims.taken
    world.parts.in_flight = False
    assert world.part()[1].items == (0,)


@pytest.mark.parametrize(("count", "end"), [(0, 2), (1, 6), (2, 10)], ids=["none", "one", "two"])
def test_a_part_ends_before_what_may_open_its_first_missing_item(count, end):
    """Models lay a prompt out by its opening marks, and look for the item behind each."""
    assert PROMPT.end(count) == end


def test_an_item_right_behind_another_has_no_mark_to_leave_out():
    prompt = Prompt(array("q", [9, 9, 1]), (0, 1), (0, 1))
    assert [prompt.end(0), prompt.end(1)] == [0, 1]


def test_the_text_before_the_first_item_is_a_part(world):
    world.follow()
    (part,) = world.early.take()
    assert list(part.input_ids) == [1, 1]
    assert part.rid.startswith(f"r{PART}"), "an abort of the request ends it too"
    assert read(part) == Beginning("r", (), (), 2)


def test_a_part_reaches_up_to_the_first_missing_item_in_the_order_of_the_prompt(world):
    world.follow()
    world.early.take()
    world.arrive(1)
    assert not world.early.take(), "the first item of the prompt is missing"
    assert not world.claims.taken
    world.arrive(0)
    part, carried = world.part()
    assert world.claims.taken == [("ticket", "c", "part 0", (0,))]
    assert list(part.input_ids) == list(PROMPT.ids[:6])
    assert carried.items == (0,)
    assert [one.key for one in carried.landed if one] == [bytes(32)]
    world.arrive(2)
    assert not world.early.take(), "all have landed: the claim itself settles"
    assert len(world.claims.taken) == 1


def test_one_part_of_a_request_is_in_flight(world):
    world.follow()
    world.early.take()
    world.parts.in_flight = True
    world.arrive(0)
    assert not world.early.take()
    assert not world.claims.taken
    world.parts.in_flight = False
    _, carried = world.part()
    world.parts.in_flight = True
    world.arrive(2)
    assert not world.early.take()
    world.parts.in_flight = False
    _, carried = world.part()
    assert carried.items == (0, 2)


def test_a_part_that_is_about_to_begin_is_in_flight(world):
    """In the tick in which its items are handed out another one may land."""
    world.follow()
    world.early.take()
    world.arrive(0)
    world.early.take()
    (*_, name, _) = world.claims.taken[-1]
    assert world.early.hear(Settled(name, (Landed(bytes(32), LAYOUT, 32, 0, 0), None, None)))
    world.arrive(2)
    (part,) = world.early.take()
    assert read(part).items == (0,)
    assert len(world.claims.taken) == 1
    world.parts.in_flight = True
    assert not world.early.take()
    assert len(world.claims.taken) == 1


def test_items_that_are_gone_again_make_no_part(world):
    world.follow()
    world.early.take()
    world.arrive(0)
    world.early.take()
    (*_, name, _) = world.claims.taken[-1]
    assert world.early.hear(Settled(name, (), "RequestCancelledError", "gone"))
    assert not world.early.take()


@pytest.mark.parametrize("in_one_tick", [False, True])
def test_items_that_were_handed_out_are_given_back_by_all_ranks(world, in_one_tick):
    """Even where their request has ended: only a part tells all ranks of them. It is no part of
    that request any more, which ranks have seen by then."""
    world.follow()
    world.early.take()
    world.arrive(0)
    world.early.take()
    (*_, name, _) = world.claims.taken[-1]
    item = Landed(bytes(32), LAYOUT, 32, 0, 0)
    outcome = Settled(name, (item, None, None))
    if in_one_tick:
        assert world.early.hear(outcome)
        world.early.leave("c")
    else:
        world.early.leave("c")
        assert world.early.hear(outcome)
    (part,) = world.early.take()
    assert (read(part).of, read(part).landed) == ("", (item,))
    world.arrive(2)
    assert not world.early.take(), "of a claim that is over"


def test_what_the_prefix_cache_covers_is_not_taken(world):
    world.follow((0,), (LAYOUT,) * 3)
    (part,) = world.early.take()
    assert read(part) == Beginning("r", (0,), (None,), 2), "the text behind it"
    assert not world.claims.taken
    world.arrive(2)
    _, carried = world.part()
    assert world.claims.taken[-1][-1] == (2,)
    assert carried.items == (0, 2)
    assert [one is None for one in carried.landed] == [True, False]


def test_other_outcomes_are_not_taken(world):
    assert not world.early.hear(Settled("c"))


def test_a_part_waits_for_more_items_or_for_others_to_end(world):
    world.parts.smallest = 16
    world.follow()
    assert not world.early.take(), "two tokens"
    world.arrive(0)
    assert not world.early.take()
    assert not world.claims.taken, "15 tokens"
    world.parts.smallest = None
    assert not world.early.take()
    assert not world.claims.taken, "others wait"
    world.parts.smallest = 15
    _, carried = world.part()
    assert (carried.items, carried.least) == ((0,), 15)
    world.parts.smallest = 100
    world.arrive(2)
    assert not world.early.take()
    assert len(world.claims.taken) == 1
    world.early.leave("c")
    world.parts.smallest = 1
    assert not world.early.take(), "of a claim that is over"


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(early_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_part_waits_a_moment_for_an_item_of_another_encoder(world, clock):
    world.parts.pause = 3.0
    world.follow()
    world.early.take()
    world.arrive(0)
    _, carried = world.part()
    assert carried.items == (0,), "the encoder that sent it sends the others"
    world.arrive(2, elsewhere=True)
    assert not world.early.take()
    assert len(world.claims.taken) == 1
    clock.now += 2
    assert world.early.due_s() == 1.0
    clock.now += 1
    _, carried = world.part()
    assert carried.items == (0, 2)
    assert world.early.due_s() == math.inf, "an idle scheduler may sleep"


def test_items_that_keep_landing_hold_a_part_up_once(world, clock):
    world.parts.pause = 3.0
    world.follow()
    world.early.take()
    world.arrive(0, elsewhere=True)
    assert not world.early.take()
    clock.now += 2
    world.arrive(2, elsewhere=True)
    assert world.early.due_s() == 1.0
    clock.now += 1
    _, carried = world.part()
    assert carried.items == (0, 2)


def test_a_part_that_pauses_makes_way_for_the_last_item(world, clock):
    world.parts.pause = 3.0
    world.follow((0,), (LAYOUT,) * 3)
    world.early.take()
    world.arrive(2, elsewhere=True)
    assert not world.early.take()
    world.arrive(1)
    clock.now += 3
    assert not world.early.take()
    assert not world.claims.taken
    assert world.early.due_s() == math.inf


def test_a_claim_that_ends_while_its_part_pauses_wakes_nobody(world, clock):
    world.parts.pause = 3.0
    world.follow((0,), (LAYOUT,) * 3)
    world.early.take()
    world.arrive(2, elsewhere=True)
    assert not world.early.take()
    assert world.early.due_s() == 3.0
    world.early.leave("c")
    assert not world.early.take()
    assert world.early.due_s() == math.inf


def test_a_part_ends_within_the_item_that_is_landing(world):
    world.follow()
    world.early.take()
    world.arrive(0)
    _, carried = world.part()
    world.begin(1, 3)
    assert not world.early.take(), "it is behind one of which nothing is here"
    world.begin(2, 3)
    part, carried = world.part()
    assert world.claims.taken[-1][-1] == (0, 2)
    assert world.claims.begun == 2
    assert list(part.input_ids) == list(PROMPT.ids[:8]), "with the item's placeholder"
    assert carried.items == (0, 2)
    world.begin(2, 4)
    assert not world.early.take(), "one token more"
    assert len(world.claims.taken) == 2
    world.arrive(2)
    part, carried = world.part()
    assert world.claims.begun == 1, "of the next item rows were here before"
    assert carried.items == (0, 1, 2)
    assert list(part.input_ids) == list(PROMPT.ids[:12])


def test_an_item_that_has_landed_counts_whole_though_it_began_with_few_rows(world):
    world.follow()
    world.early.take()
    world.begin(0, 3)
    world.part()
    world.arrive(0)
    world.parts.smallest = ROWS - 3 + 2  # with the text behind it
    _, carried = world.part()
    assert (carried.items, world.claims.begun) == ((0,), -1)


def test_rows_of_which_an_encoder_has_died_are_not_taken_again_until_there_are_more(world):
    world.follow()
    world.early.take()
    world.begin(0, 5)
    world.early.take()
    (*_, name, _) = world.claims.taken[-1]
    assert world.early.hear(Settled(name, (), "RequestCancelledError", "gone"))
    world.begin(0, 2)
    assert not world.early.take()
    assert len(world.claims.taken) == 1
    world.begin(0, 8)
    _, carried = world.part()
    assert carried.items == (0,)
