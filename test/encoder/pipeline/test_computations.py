from __future__ import annotations

import asyncio
import gc
import math
import sys
import time

import pytest
import torch

from encoder.towers import ROW_BYTES, key_of, settle, states, until, value
from integrity import check_cache
from media.samples import encoded, picture
from sglang_epd.encoder.breakage import Breakage
from sglang_epd.encoder.pipeline import computations as module
from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue
from sglang_epd.encoder.pipeline.work import MediaNeededError
from sglang_epd.encoder.tower import TowerBrokenError
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EncoderLostError,
    MediaError,
    RequestCancelledError,
    UnavailableError,
)

two_towers = pytest.mark.parametrize("towers", [2], indirect=True)
one_or_two_towers = pytest.mark.parametrize("towers", [1, 2], indirect=True)


def bounded(**bounds):
    return pytest.mark.parametrize("bounds", [bounds], ids=[""])


# One embedding for many


async def test_many_askers_of_one_key_share_one_preparation_and_one_forward(tower, ask, count):
    tower.hold(forward=True)
    holds = [ask(b"x", f"r{n}") for n in range(24)]
    await until(lambda: tower.running)
    late = ask(b"x", "late")
    assert (await late.layout()).tokens == 1, "at once"
    assert not late.made.done()
    tower.go_on()
    assert await asyncio.gather(*map(value, [*holds, late])) == [float(ord("x"))] * 25
    assert [hold.source for hold in holds] == ["computed"] + ["coalesced"] * 23
    assert (tower.preparations, tower.batches) == ([b"x"], [[b"x"]])
    assert count("lookups_total", source="computed") == 1
    assert count("lookups_total", source="coalesced") == 24


async def test_askers_hear_of_rows_before_all_are_made(tower, ask):
    tower.rows[b"x"] = 3
    tower.hold(forward=True)
    first = ask(b"x")
    waiting = asyncio.create_task(first.beginning(0))
    await until(lambda: tower.running)
    made = torch.zeros(3, 4)
    tower.tell(made, 1)
    assert await waiting == (made, 1)
    late = ask(b"x", "late")
    assert await late.beginning(0) == (made, 1), "at once"
    waiting = [asyncio.create_task(hold.beginning(1)) for hold in (first, late)]
    await settle()
    assert not any(one.done() for one in waiting)
    tower.tell(made, 2)
    assert await asyncio.gather(*waiting) == [(made, 2)] * 2
    last = asyncio.create_task(late.beginning(2))
    await settle()
    tower.go_on()
    assert await last is None, "all are there"
    assert (await first.embedding()).shape == (3, 4)


@pytest.mark.parametrize("shared", [True, False], ids=["others want it", "nobody wants it"])
@pytest.mark.parametrize("stage", ["waiting", "preparing", "ready", "running"])
async def test_an_asker_that_leaves_takes_only_its_own_interest_along(
    tower, computations, ask, stage, shared
):
    tower.hold(prepare=stage in ("waiting", "preparing"), forward=stage in ("ready", "running"))
    busy = [ask(bytes([n]), "other") for n in range({"waiting": 3, "ready": 1}.get(stage, 0))]
    await until(lambda: not busy or tower.preparing or tower.running)
    first = ask(b"x", "r1")
    others = [ask(b"x", "r2")] if shared else []
    await until(lambda: states(computations).get(stage) == 1)
    first.release()
    first.release()
    await settle()
    tower.go_on()
    for one in others:
        assert await value(one) == ord("x")
    await asyncio.gather(*map(value, busy))
    await until(lambda: not states(computations))
    assert tower.preparations.count(b"x") == (shared or stage != "waiting")
    assert ([b"x"] in tower.batches) == (shared or stage == "running")
    assert not tower.in_memory


async def test_a_long_video_ends_between_passes_when_nobody_waits_any_more(
    tower, computations, ask
):
    tower.hold(forward=True)
    first = ask(b"x", "r1")
    await until(lambda: tower.running)
    made = torch.zeros(3, 4)
    tower.tell(made, 1)
    first.release()
    with pytest.raises(RequestCancelledError):
        tower.tell(made, 2)
    tower.go_on()
    await until(lambda: not states(computations))


async def test_preparing_ends_when_nobody_waits_any_more(tower, ask):
    ended = []

    async def forever(modality, data, *asked):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(data)

    tower.prepare = forever
    first, second = ask(b"a"), ask(b"a")
    await settle()
    first.release()
    await settle()
    assert ended == []
    second.release()
    await settle()
    assert ended == [b"a"]


@pytest.mark.parametrize("end", ["made", "damaged", "left"])
async def test_media_are_gone_when_nobody_holds_them_any_more(
    tower, computations, end, monkeypatch
):
    """Without waiting for a collection of cycles, which a bound on bytes knows nothing of."""
    media = bytes([1, 2, 3]) * 1000
    prepare, watch = tower.prepare, Breakage(settle).watch
    monkeypatch.setattr(tower, "prepare", lambda *asked: watch(prepare(*asked)))
    gc.disable()
    try:
        before = sys.getrefcount(media)
        if end == "damaged":
            tower.bad_media[media] = MediaError("it is damaged")
        tower.hold(prepare=end == "left")
        hold = computations.hold(b"key", "IMAGE", media, "r", time.monotonic() + 60.0)
        await until(lambda: tower.preparations)
        if end == "made":
            await hold.embedding()
        elif end == "damaged":
            with pytest.raises(MediaError):
                await hold.embedding()
        hold.release()
        await until(lambda: not states(computations))
        await settle()
        for told in (tower.preparations, tower.batches, tower.in_memory, tower.bad_media):
            told.clear()
        assert sys.getrefcount(media) == before
    finally:
        gc.enable()


# Stages and batches


async def test_what_came_while_a_batch_ran_is_the_next_batch(tower, computations, ask, busy):
    holds = [busy, *(ask(name) for name in (b"a1", b"a2", b"b1", b"a3"))]
    await until(lambda: states(computations) == {"running": 1, "ready": 4})
    tower.go_on()
    await asyncio.gather(*map(value, holds))
    assert tower.batches == [[b"busy"], [b"a1", b"a2", b"a3"], [b"b1"]]


async def test_a_tower_that_takes_two_batches_has_the_next_in_hand(tower, computations, ask, busy):
    tower.depth = 2
    holds = [busy, ask(b"x2"), ask(b"x3")]
    await until(lambda: tower.running == 2)
    holds.append(ask(b"x4"))
    await settle()
    assert tower.running == 2
    assert states(computations)["ready"] >= 1
    tower.go_on()
    await asyncio.gather(*map(value, holds))
    ran = [name for batch in tower.batches for name in batch]
    assert sorted(ran) == [b"busy", b"x2", b"x3", b"x4"]


@bounded(batch=BatchBounds(patches=8, items=4))
@pytest.mark.parametrize(
    ("depth", "owner", "expected"),
    [
        (2, "r", [[b"x1"], [b"x2", b"x3"]]),
        (2, "other", [[b"x2", b"x1"], [b"x3"]]),
        # On a processor, which is between two passes, not idle.
        (1, "r", [[b"x1", b"x2"], [b"x3"]]),
    ],
)
async def test_an_idle_tower_begins_with_one_large_item_of_a_request(
    tower, computations, ask, busy, depth, owner, expected
):
    names = [b"x1", b"x2", b"x3"]
    tower.patches |= dict.fromkeys(names, 4)
    owners = ["r", owner, "r"]
    holds = [ask(names[place], owners[place], place=place) for place in range(3)]
    await until(lambda: states(computations).get("ready") == 3)
    await settle()
    tower.depth = depth
    tower.go_on()
    await asyncio.gather(*map(value, [busy, *holds]))
    assert tower.batches == [[b"busy"], *expected]


@pytest.mark.parametrize("first", ["prepared", "ran"])
async def test_a_second_batch_waits_for_what_is_being_prepared_while_the_first_runs(
    tower, computations, ask, busy, first
):
    tower.depth = 2
    tower.slow[b"x3"] = asyncio.Event()
    second, third = ask(b"x2"), ask(b"x3")
    await until(lambda: states(computations) == {"running": 1, "ready": 1, "preparing": 1})
    await settle()
    assert tower.running == 1
    if first == "prepared":
        tower.slow[b"x3"].set()
        await until(lambda: tower.running == 2)
    tower.go_on()
    await asyncio.gather(value(busy), value(second))
    tower.slow[b"x3"].set()
    await value(third)
    later = [[b"x2", b"x3"]] if first == "prepared" else [[b"x2"], [b"x3"]]
    assert tower.batches == [[b"busy"], *later]


async def test_no_more_than_a_batch_is_ready_at_a_time(tower, computations, ask, busy):
    holds = [ask(b"%d" % n) for n in range(20)]
    await settle()
    assert states(computations)["ready"] == 4
    assert len(tower.in_memory) == 5
    tower.go_on()
    await asyncio.gather(*map(value, holds))
    assert max(map(len, tower.batches)) <= 4


async def test_items_of_a_request_are_prepared_and_run_in_the_order_of_their_places(
    tower, computations, ask, busy
):
    names = [b"%c" % (97 + place) for place in range(7)]  # each a batch of its own
    tower.slow[names[0]] = asyncio.Event()
    holds = [busy, *(ask(names[place], place=place) for place in reversed(range(7)))]
    await until(lambda: states(computations).get("ready") == 3)
    tower.slow[names[0]].set()
    await until(lambda: states(computations)["ready"] == 4)
    tower.go_on()
    await asyncio.gather(*map(value, holds))
    assert tower.preparations == [b"busy", *names]
    assert tower.batches == [[b"busy"], *([name] for name in names)]


async def test_what_is_being_prepared_is_run_in_the_turn_of_a_small_request_that_joins(
    tower, computations, ask, busy
):
    names = [b"%c" % (97 + place) for place in range(3)]
    tower.slow = {name: asyncio.Event() for name in names}
    holds = [ask(name, "large", place=place) for place, name in enumerate(names)]
    await until(lambda: states(computations) == {"running": 1, "preparing": 3})
    holds.append(ask(names[2], "small"))
    for name in names:
        tower.slow[name].set()
    await until(lambda: states(computations) == {"running": 1, "ready": 3})
    tower.go_on()
    await asyncio.gather(busy.embedding(), *map(value, holds))
    assert tower.batches == [[b"busy"], [names[2]], *([name] for name in names[:2])]


@pytest.mark.parametrize("stage", ["waiting", "ready"])
async def test_what_a_large_request_asked_for_first_is_made_in_the_turn_of_a_small_one(
    tower, computations, ask, busy, stage
):
    names = [b"%c" % (97 + place) for place in range(12)]
    holds = [ask(name, "large", place=place) for place, name in enumerate(names)]
    await until(lambda: states(computations) == {"running": 1, "ready": 4, "waiting": 8})
    shared = {"waiting": names[11], "ready": names[3]}[stage]
    holds.append(ask(shared, "small"))
    assert holds[-1].source == "coalesced"
    tower.go_on()
    await asyncio.gather(busy.embedding(), *map(value, holds))
    # With what was ready before it.
    assert tower.batches.index([shared]) <= {"waiting": 5, "ready": 1}[stage]
    assert sorted(tower.batches) == sorted([[b"busy"], *([name] for name in names)])


async def test_a_batch_in_hand_overtakes_no_item_of_its_request(tower, computations, ask, busy):
    """Its tower has something to do, and the request is prefilled in the order of its items."""
    tower.depth = 2
    names = [b"x0", b"x1", b"x2"]
    tower.patches = dict.fromkeys(names, 50)  # two are a batch
    tower.slow[b"x1"] = asyncio.Event()
    holds = [ask(name, place=place) for place, name in enumerate(names)]
    await until(lambda: states(computations) == {"running": 1, "ready": 2, "preparing": 1})
    await settle()
    assert tower.running == 1
    tower.slow[b"x1"].set()
    await until(lambda: tower.running == 2)
    tower.go_on()
    await asyncio.gather(*map(value, (busy, *holds)))
    assert tower.batches == [[b"busy"], [b"x0", b"x1"], [b"x2"]]


async def test_a_batch_in_hand_waits_for_a_larger_item_until_the_tower_is_idle(
    tower, computations, ask, busy
):
    tower.depth = 2
    small = encoded(picture(64, 64), "JPEG")
    tower.patches = {b"x0": 99, small: 99}  # each a batch
    tower.slow[b"x0"] = asyncio.Event()
    slow, quick = ask(b"x0", place=0), ask(small, place=1)
    await until(lambda: states(computations) == {"running": 1, "ready": 1, "preparing": 1})
    await settle()
    assert tower.running == 1
    tower.go_on()
    await quick.embedding()
    tower.slow[b"x0"].set()
    await asyncio.gather(value(busy), value(slow))
    assert tower.batches == [[b"busy"], [small], [b"x0"]]


@pytest.mark.parametrize("first", ["is made", "is bad"])
async def test_an_idle_tower_begins_with_the_first_item_of_a_request(
    tower, computations, ask, first
):
    """That is about to be ready. Others do not wait for it, nor does it for later ones."""
    tower.slow = {b"x0": asyncio.Event(), b"x2": asyncio.Event()}
    if first == "is bad":
        tower.bad_media[b"x0"] = MediaError("it is damaged")
    slow, quick, last = (ask(b"x%d" % place, place=place) for place in range(3))
    await until(lambda: states(computations) == {"ready": 1, "preparing": 2})
    await settle()
    assert not tower.batches
    await value(ask(b"y", "other"))
    assert tower.batches == [[b"y"]]
    tower.slow[b"x0"].set()
    await value(quick)
    if first == "is bad":
        assert tower.batches == [[b"y"], [b"x1"]]
    else:
        await value(slow)
        assert tower.batches == [[b"y"], [b"x0", b"x1"]]
    tower.slow[b"x2"].set()
    await value(last)


async def test_large_items_leave_a_place_for_small_ones_to_be_prepared(tower, computations, ask):
    """Whose size is not told may be anything, and is large."""
    small = [encoded(picture(448, 448 - n), "JPEG") for n in range(3)]
    tower.hold(prepare=True)
    for n in range(6):
        ask(b"large%d" % n, f"hostile{n}")
    await settle()
    assert tower.preparing == tower.preparers - 1
    holds = [ask(data, f"honest{n}") for n, data in enumerate(small)]
    await settle()
    assert tower.preparing == tower.preparers
    assert tower.preparations[-1] in small
    # No place was free before: the small ones have no more than all that large ones leave.
    assert states(computations)["waiting"] == 3 + 2
    tower.go_on()
    for hold in holds:
        await hold.embedding()


async def test_a_large_item_without_a_place_does_not_stop_a_small_one_behind_it(tower, ask):
    small = encoded(picture(64, 64), "JPEG")
    tower.hold(prepare=True)
    # Of one request, which goes in its own order.
    for n in range(6):
        ask(b"large%d" % n, "r")
    hold = ask(small, "r")
    await settle()
    assert tower.preparations[-1] == small
    tower.go_on()
    await hold.embedding()


async def test_what_comes_and_goes_together_is_one_look_at_the_queue(tower, ask, monkeypatch):
    looks = []
    look = FairQueue.take_expired
    monkeypatch.setattr(
        FairQueue, "take_expired", lambda queue, now: looks.append(len(queue)) or look(queue, now)
    )
    tower.hold(prepare=True)
    holds = [ask(b"a%d" % n) for n in range(200)]
    await asyncio.sleep(0)
    assert [length for length in looks if length] == [200]
    for hold in holds:
        hold.release()
    await asyncio.sleep(0)
    assert len(looks) == 4, "of two queues, twice"


@pytest.mark.parametrize("stage", ["prepare", "forward"])
async def test_only_the_bad_item_fails(tower, ask, busy, stage):
    good = [ask(b"a%d" % n) for n in range(3)]
    bad = ask(b"abad")
    failures = tower.bad_media if stage == "prepare" else tower.bad_batch
    failures[b"abad"] = MediaError("not a picture")
    await settle()
    tower.go_on()
    await asyncio.gather(*map(value, good))
    with pytest.raises(MediaError, match="not a picture"):
        await bad.embedding()
    assert tower.preparations.count(b"abad") == 1
    with pytest.raises(MediaError):
        await ask(b"abad", "again").embedding()


async def test_of_a_failing_batch_what_nobody_wants_is_not_run_again(tower, ask, busy):
    tower.bad_batch[b"abad"] = RuntimeError("a secret")
    bad, good, left = ask(b"abad"), ask(b"a1"), ask(b"a2")
    await settle()
    tower.go_on()
    await value(busy)
    tower.hold(forward=True)
    await until(lambda: tower.running)
    assert len(tower.batches[-1]) == 3
    left.release()
    tower.go_on()
    await value(good)
    with pytest.raises(EncodeError) as raised:
        await bad.embedding()
    assert "secret" not in str(raised.value)
    assert sum(b"a2" in batch for batch in tower.batches) == 1


@pytest.mark.parametrize("stage", ["prepare", "forward"])
async def test_a_broken_tower_does_not_spoil_a_key_for_ever(tower, ask, monkeypatch, stage):
    """It breaks its contract: is cancelled from within, or returns nothing."""

    async def broken(*_args):
        if stage == "prepare":
            raise asyncio.CancelledError
        return []

    with monkeypatch.context() as patch:
        patch.setattr(tower, stage, broken)
        hold = ask(b"x")
        with pytest.raises(EncodeError):
            await hold.embedding()
    assert await value(ask(b"x", "again")) == ord("x")


# Memory


@bounded(staged_bytes=4 * ROW_BYTES)
async def test_no_batch_is_begun_past_the_memory_for_embeddings(tower, computations, ask):
    tower.rows = dict.fromkeys((b"a", b"b", b"c"), 2)
    first, second = ask(b"a"), ask(b"b")
    await asyncio.gather(value(first), value(second))
    third = ask(b"c")
    await until(lambda: states(computations) == {"ready": 1})
    await settle()
    assert not third.made.done()
    first.release()
    assert await value(third) == ord("c")


@bounded(staged_bytes=ROW_BYTES)
async def test_one_over_the_memory_is_run_when_there_is_nothing_else(tower, computations, ask):
    tower.rows[b"huge"] = 100
    small = ask(b"small")
    await value(small)
    huge = ask(b"huge")
    await until(lambda: states(computations) == {"ready": 1})
    small.release()
    await huge.embedding()


@bounded(staged_bytes=4 * ROW_BYTES)
async def test_what_is_kept_for_those_who_wait_is_not_in_the_way(tower, ask):
    """It may be long before they want it, and others are not to wait for them."""
    tower.rows = {b"a": 3, b"b": 2}
    waits = ask(b"a")
    await value(waits)
    waits.want(False)
    assert await value(ask(b"b")) == ord("b")
    waits.want(True)
    assert await value(waits) == ord("a")
    assert tower.preparations == [b"a", b"b"]


@bounded(capacity=0)
@pytest.mark.parametrize("kept", [0, 1])
async def test_what_is_kept_for_those_who_wait_is_bounded(
    tower, computations, ask, monkeypatch, kept
):
    monkeypatch.setattr(module, "_KEPT_BYTES", kept * ROW_BYTES)
    holds = [ask(name) for name in (b"a", b"b")]
    await asyncio.gather(*map(value, holds))
    for hold in holds:
        hold.want(False)
    assert computations.cache.nbytes == kept * ROW_BYTES
    for hold in holds:
        hold.want(True)
    assert [await value(hold) for hold in holds] == [ord("a"), ord("b")]
    assert len(tower.preparations) == 4 - kept
    assert holds[1].source == "computed"


@pytest.mark.parametrize("bounds", [{"capacity": 0}, {}], ids=["no cache", "cache"])
async def test_what_is_kept_for_long_keeps_nothing_of_its_batch(
    tower, computations, ask, busy, bounds
):
    """Until then the batch's memory stays, and counts, whole."""
    holds = [ask(name) for name in (b"a1", b"a2", b"a3")]
    await until(lambda: states(computations) == {"ready": 3, "running": 1})
    busy.release()
    tower.go_on()
    embeddings = [await hold.embedding() for hold in holds]
    assert len({each.untyped_storage().data_ptr() for each in embeddings}) == 1
    assert computations.status()["staged_bytes"] == 3 * ROW_BYTES
    holds[0].want(False)
    kept = await holds[0].embedding()
    assert kept.untyped_storage().nbytes() == ROW_BYTES
    holds[1].release()
    assert computations.status()["staged_bytes"] == 3 * ROW_BYTES
    for hold in holds:
        hold.release()
    left = 3 + 1 if computations.cache.capacity_bytes else 0
    assert (len(computations.cache), computations.cache.nbytes) == (left, left * ROW_BYTES)


async def test_what_two_wait_for_is_kept_once(computations, ask, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", ROW_BYTES)
    one, two = ask(b"a", "r1"), ask(b"a", "r2")
    assert [await value(hold) for hold in (one, two)] == [ord("a")] * 2
    used = []
    for hold, wanted in [(one, False), (two, False), (one, True), (two, True)]:
        hold.want(wanted)
        used.append(computations.status()["staged_bytes"])
    assert used == [ROW_BYTES, 0, ROW_BYTES, ROW_BYTES]
    two.want(False)
    two.release()
    assert computations.status()["staged_bytes"] == ROW_BYTES
    one.release()
    assert (computations.status()["staged_bytes"], computations._kept) == (0, {})


@pytest.mark.parametrize("media", [True, False])
async def test_what_was_given_up_is_made_again_where_its_media_are_here(
    tower, computations, ask, monkeypatch, media
):
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    await value(ask(b"x", "r1"))
    hold = ask(b"x", "r2", media=media)
    # It was given up, but is there still.
    hold.want(False)
    hold.want(True)
    assert (await value(hold), hold.source) == (ord("x"), "cached")
    hold.want(False)
    computations.cache.clear()
    assert not computations.at_hand(key_of(b"x"))
    hold.want(True)
    if media:
        assert (await value(hold), hold.source) == (ord("x"), "computed")
    else:
        with pytest.raises(MediaNeededError):
            await hold.embedding()
    assert tower.preparations == [b"x"] * (1 + media)


async def test_what_is_at_hand_needs_no_media(tower, computations, ask):
    assert not computations.at_hand(key_of(b"x"))
    tower.hold(forward=True)
    first = ask(b"x")
    assert computations.at_hand(key_of(b"x"))
    joined = ask(b"x", media=False)
    # Its work goes on for who has no media of its own.
    first.release()
    tower.go_on()
    assert (await value(joined), joined.source) == (ord("x"), "coalesced")
    joined.release()
    assert computations.at_hand(key_of(b"x"))
    again = ask(b"x", media=False)
    assert (await value(again), again.source) == (ord("x"), "cached")
    assert tower.preparations == [b"x"]


@pytest.mark.parametrize("other", [False, True], ids=["", "another wants it"])
async def test_nothing_is_run_for_who_does_not_want_it_now(tower, computations, ask, busy, other):
    hold = ask(b"x", "r1")
    await hold.layout()
    hold.want(False)
    willing = [ask(b"x", "r2")] if other else []
    tower.go_on()
    await value(busy)
    await settle()
    assert states(computations) == ({} if other else {"ready": 1})
    hold.want(True)
    for one in (hold, *willing):
        assert await value(one) == ord("x")
    assert tower.preparations.count(b"x") == 1


@bounded(batch=BatchBounds(patches=100, items=2))
async def test_unwanted_pixels_make_room_and_come_back(tower, computations, ask, busy):
    waits = [ask(name) for name in (b"w1", b"w2")]
    for hold in waits:
        await hold.layout()
        hold.want(False)
    assert states(computations) == {"running": 1, "ready": 2}
    other = ask(b"other")
    await other.layout()
    assert tower.discarded == [b"w1"], "no more of them than need be"
    tower.go_on()
    await asyncio.gather(value(busy), value(other))
    for hold in waits:
        hold.want(True)
    assert [await value(hold) for hold in waits] == [sum(b"w1"), sum(b"w2")]
    assert tower.preparations.count(b"w1") == 2
    assert tower.preparations.count(b"w2") == 1


@two_towers
@bounded(batch=BatchBounds(patches=100, items=1))
async def test_unwanted_pixels_stay_where_no_room_is_needed(towers, ask):
    for tower in towers:
        tower.hold(forward=True)
    busy = [ask(name) for name in (b"1", b"2")]
    await until(lambda: all(tower.running for tower in towers))
    waits = [ask(name) for name in (b"w1", b"w2")]
    for hold in waits:
        await hold.layout()
        hold.want(False)
    await ask(b"other").layout()
    assert sum(len(tower.discarded) for tower in towers) == 1
    for tower in towers:
        tower.go_on()
    await asyncio.gather(*map(value, busy))


# The cache


async def test_a_hit_prepares_nothing(tower, ask, count):
    await value(ask(b"x", "r1"))
    hit = ask(b"x", "r2")
    assert hit.made.done()
    assert (await hit.layout()).tokens == 1
    assert (await value(hit), hit.source) == (ord("x"), "cached")
    assert tower.preparations == [b"x"]
    assert count("lookups_total", source="cached") == 1


async def test_what_is_dropped_while_in_use_stays_for_its_user(computations, ask):
    first = ask(b"x", "r1")
    embedding = await first.embedding()
    assert computations.cache.clear() == 1
    again = ask(b"x", "r2")
    assert again.source == "computed"
    assert await value(again) == ord("x")
    assert (await first.embedding()) is embedding
    first.release()
    check_cache(computations.cache)


# Deadlines


async def test_an_expired_item_is_not_begun(tower, ask):
    hold = ask(b"x", ttl_s=-1.0)
    with pytest.raises(DeadlineError):
        await hold.layout()
    assert not tower.preparations


@pytest.mark.parametrize("patient", ["none", "shares", "joins", "shares alone", "leaves"])
async def test_an_expired_item_is_run_for_those_who_have_time_left(
    tower, computations, ask, busy, patient
):
    hurried = ask(b"x", "r1", ttl_s=0.02)
    others = [] if patient in ("none", "joins") else [ask(b"x", "r2")]
    await hurried.layout()
    if patient == "leaves":
        others.pop().release()
    await asyncio.sleep(0.03)
    if patient == "joins":
        others = [ask(b"x", "r2")]
    elif patient == "shares alone":
        hurried.release()
    tower.go_on()
    await value(busy)
    if others:
        assert await value(others[0]) == ord("x")
    else:
        with pytest.raises(DeadlineError):
            await hurried.embedding()
        assert tower.discarded == [b"x"]


@pytest.mark.parametrize("joins", [True, False], ids=["another has time", "alone"])
async def test_media_that_were_prepared_for_too_short_are_prepared_for_who_has_time_left(
    tower, ask, monkeypatch, joins
):
    """A decoder is given the deadline of those who have asked when it begins."""
    prepare, asked, expired = tower.prepare, [], asyncio.Event()

    async def until_the_deadline(modality, data, deadline, options):
        asked.append(deadline)
        if len(asked) == 1:
            await expired.wait()
            raise DeadlineError("the request's deadline passed while it was decoded")
        return await prepare(modality, data, deadline, options)

    monkeypatch.setattr(tower, "prepare", until_the_deadline)
    hurried = ask(b"x", "r1", ttl_s=1.0)
    await until(lambda: asked)
    patient = ask(b"x", "r2") if joins else None
    expired.set()
    if patient is None:
        with pytest.raises(DeadlineError):
            await hurried.embedding()
        assert len(asked) == 1
    else:
        assert await value(patient) == ord("x")
        assert asked[1] > asked[0] + 30.0


# Towers that are lost


@one_or_two_towers
@pytest.mark.parametrize("stage", ["prepare", "forward"])
async def test_what_a_lost_tower_had_begins_again(towers, ask, count, stage):
    for tower in towers:
        tower.hold(prepare=stage == "prepare", forward=stage == "forward")
    holds = [ask(b"a%d" % n) for n in range(6)]
    busy = "preparing" if stage == "prepare" else "running"
    await until(lambda: all(getattr(tower, busy) for tower in towers))
    await settle()
    towers[0].die()
    for tower in towers:
        tower.go_on()
    assert await asyncio.gather(*map(value, holds)) == [sum(b"a%d" % n) for n in range(6)]
    assert count("lost_items_total") >= 1


@two_towers
async def test_other_towers_take_over_from_one_that_stays_away(towers, computations, ask):
    lost, other = towers
    lost.revives = False
    for tower in towers:
        tower.hold(forward=True)
    holds = [ask(b"a%d" % n) for n in range(12)]
    await until(lambda: all(tower.running for tower in towers))
    await settle()
    lost.die()
    other.go_on()
    await asyncio.gather(*map(value, holds))
    assert [tower["alive"] for tower in computations.status()["towers"]] == [False, True]
    assert computations.able
    other.alive = False
    assert not computations.able


@pytest.mark.parametrize("back", [True, False])
async def test_items_wait_for_the_only_tower_until_their_deadline(tower, ask, monkeypatch, back):
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.01)
    tower.alive = False
    hold = ask(b"x", ttl_s=60.0 if back else 0.03)
    await settle()
    assert not tower.preparations
    if back:
        tower.alive = True
        assert await value(hold) == ord("x")
    else:
        with pytest.raises(DeadlineError):
            await hold.layout()


@one_or_two_towers
@pytest.mark.parametrize("stage", ["media", "batch"])
@pytest.mark.parametrize("slow", [False, True], ids=["", "slow"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_an_item_that_kills_towers_fails_and_takes_nobody_with_it(
    towers, ask, stage, slow, depth
):
    for tower in towers:
        tower.depth = depth
        getattr(tower, f"deadly_{stage}").add(b"apoison")
        if slow:
            # The others are being prepared whenever the poison takes effect.
            prepare = tower.prepare

            async def slowly(modality, data, *asked, prepare=prepare):
                if data != b"apoison":
                    await settle()
                return await prepare(modality, data, *asked)

            tower.prepare = slowly
        tower.hold(forward=True)
    names = [b"apoison", *(b"a%d" % n for n in range(5))]
    holds = [ask(name) for name in names]
    await settle()
    for tower in towers:
        tower.go_on()
    poison, *good = holds
    assert await asyncio.gather(*map(value, good)) == [sum(name) for name in names[1:]]
    with pytest.raises(EncodeError, match="died"):
        await poison.embedding()
    deaths = sum(tower.deaths for tower in towers)
    assert deaths == module._MAX_LOSSES + 1


async def test_a_suspect_that_nobody_wants_now_is_in_nobodys_way(tower, computations, ask):
    tower.hold(forward=True)
    suspect = ask(b"suspect")
    await until(lambda: tower.running)
    tower.die()
    await settle()
    await until(lambda: tower.running)
    suspect.want(False)
    tower.die()
    await until(lambda: states(computations) == {"waiting": 1})
    other = ask(b"other")
    tower.go_on()
    assert await value(other) == sum(b"other")
    suspect.want(True)
    assert await value(suspect) == sum(b"suspect")


async def test_no_small_items_pass_a_large_suspect_for_ever(tower, computations, ask):
    """It waits until its tower has nothing else, which small ones without end would put off."""
    first, second = (encoded(picture(448, 448 - n), "JPEG") for n in range(2))
    tower.hold(forward=True)
    suspect = ask(b"suspect")  # whose size is not told
    await until(lambda: tower.running)
    suspect.want(False)
    tower.die()
    await until(lambda: states(computations) == {"waiting": 1})
    tower.hold(prepare=True)
    ask(first)
    await until(lambda: tower.preparing)
    suspect.want(True)
    hold = ask(second)
    await settle()
    assert tower.preparations == [b"suspect", first]
    tower.go_on()
    await hold.embedding()
    assert tower.preparations == [b"suspect", first, b"suspect", second]


@two_towers
async def test_the_tower_with_the_fewest_patches_outstanding_is_next(towers, ask):
    for tower in towers:
        tower.patches[b"large"] = 50
        tower.hold(forward=True)
    holds = [ask(b"large")]
    await until(lambda: any(tower.running for tower in towers))
    for n in range(4):
        holds.append(ask(b"small%d" % n))
        await holds[-1].layout()
    other, loaded = sorted(towers, key=lambda tower: tower.batches == [[b"large"]])
    assert loaded.preparations == [b"large"]
    assert len(other.preparations) == 4
    for tower in towers:
        tower.go_on()
    await asyncio.gather(*map(value, holds))


# What is known of it


async def test_it_says_how_long_something_new_would_wait(tower, computations, ask):
    assert computations.expected_wait_s() == 0.0
    assert computations.utilisation() == 0.0
    await value(ask(b"x"))
    assert 0 <= computations.utilisation() <= 1
    tower.hold(forward=True)
    tower.patches[b"large"] = 50
    ask(b"large")
    await until(lambda: tower.running)
    assert 0 < computations.expected_wait_s() < math.inf
    status = computations.status()
    assert status["patches_queued"] == 50
    assert status["queue"]["running"] == 1


async def test_what_waits_is_done_at_the_speed_of_the_slower_stage(tower, computations, ask):
    (lane,) = computations._lanes
    tower.bad_media[b"damaged"] = MediaError("it is damaged")
    with pytest.raises(MediaError):
        await ask(b"damaged").embedding()
    tower.hold(prepare=True, forward=True)
    left = ask(b"left")
    await until(lambda: tower.preparing)
    left.release()
    await until(lambda: not lane.preparing)
    assert lane.pixel_rate == 0, "neither was prepared"
    hold = ask(b"x")
    tower._prepare_gate.set()
    await until(lambda: tower.running)
    rate = lane.pixel_rate
    assert rate == lane.prepared_pixels > 0, "no batch has ended"
    await asyncio.sleep(0.05)
    tower.go_on()
    await value(hold)
    assert lane.ran_pixels > 0
    assert lane.pixel_rate == min(rate, lane.ran_pixels)


# The end


@pytest.mark.parametrize("gates", [{"prepare": True}, {"forward": True}], ids=str)
async def test_closing_leaves_nothing(tower, computations, ask, gates):
    tower.hold(**gates)
    holds = [ask(b"a%d" % n) for n in range(12)]
    await until(lambda: tower.preparing or tower.running)
    await settle()
    closing = asyncio.create_task(computations.close())
    await settle()
    assert not closing.done(), "the tower has not let go"
    tower.go_on()
    await closing
    assert not states(computations)
    assert not tower.in_memory
    for hold in holds:
        assert hold.made.done()
        if hold.made.exception():
            with pytest.raises(UnavailableError):
                await hold.embedding()


async def test_after_closing_there_are_hits_and_refusals(computations, ask):
    await value(ask(b"x"))
    await computations.close()
    assert await value(ask(b"x", "r2")) == ord("x")
    with pytest.raises(UnavailableError):
        await ask(b"y").layout()
    await computations.close()


# A tower that is broken for good


async def test_a_broken_tower_ends_everything_and_names_those_who_may_have_done_it(
    computations, tower, ask
):
    tower.bad_batch[b"a0"] = TowerBrokenError("it fails at everything")
    tower.hold(forward=True)
    holds = [ask(b"a%d" % n) for n in range(4)]
    await until(lambda: tower.running)
    others = [ask(b"b%d" % n) for n in range(12)]
    await until(lambda: states(computations).get("ready") == 4)
    running = {key_of(name) for batch in tower.batches for name in batch}
    tower.go_on()
    for hold in (*holds, *others):
        with pytest.raises(UnavailableError, match="broken") as raised:
            await hold.embedding()
        assert isinstance(raised.value, EncoderLostError) == (hold.key in running)
    assert computations.broken.is_set()
    with pytest.raises(UnavailableError, match="broken"):
        await ask(b"later").layout()
    assert not states(computations)


async def test_a_tower_may_be_found_broken_as_it_prepares(computations, tower, ask):
    tower.bad_media[b"x"] = TowerBrokenError("it fails at everything")
    with pytest.raises(EncoderLostError):
        await ask(b"x").layout()
    assert computations.broken.is_set()


async def test_what_was_being_prepared_when_the_tower_broke_goes_elsewhere(tower, ask, busy):
    tower.hold(prepare=True)
    late = ask(b"late")
    await until(lambda: tower.preparing)
    tower.bad_batch[b"busy"] = TowerBrokenError("it fails at everything")
    tower._forward_gate.set()
    with pytest.raises(EncoderLostError):
        await busy.embedding()
    tower.go_on()
    with pytest.raises(UnavailableError) as raised:
        await late.embedding()
    assert type(raised.value) is UnavailableError
