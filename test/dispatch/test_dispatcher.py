from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
import time

import pytest
from aiohttp import web

from dispatch.conftest import FakeEncoder
from sglang_epd.dispatch import dispatcher, policies
from sglang_epd.dispatch.dispatcher import Dispatcher, Patience
from sglang_epd.dispatch.policies import Affinity, ItemCost, Policy, shuffle
from sglang_epd.dispatch.pool import STATIC, Health, Pool, Report
from sglang_epd.encoder.admission import Admission
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EncoderLostError,
    EpdError,
    MediaError,
    MediaTooLargeError,
    MediaTypeError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
    UnreachableError,
)
from sglang_epd.wire.http import EncodeItem, ItemLayout, ItemOutcome, ReplyTo
from sglang_epd.wire.messages import (
    DECLINE_CANCELLED,
    DECLINE_DUPLICATE,
    DECLINE_TOO_LARGE,
    DECLINE_UNKNOWN,
    DECLINE_UNREADABLE,
    Layout,
    TensorSpec,
)

REPLY_TO = ReplyTo("tcp://127.0.0.1:1", "the-secret-ticket")
PATIENCE = Patience(0.3, 5.0)
FOREIGN = NamespaceError("the language server has A, this encoder B")


@Policy
def in_turn(items, snapshot, _rng):
    """Item 0 to the first encoder, item 1 to the second, and so on."""
    urls = [view.url for view in snapshot.encoders]
    return [urls[number % len(urls)] for number in range(len(items))]


def ready(*urls: str) -> Pool:
    """A pool of encoders that have answered."""
    pool = Pool("ns")
    for url in urls:
        pool.add(url)
        pool.heard(url, Report("ns"))
    return pool


def costs(items):
    return [ItemCost(b"", 1.0) for _ in items]


def some_items(count: int) -> list[EncodeItem]:
    return [EncodeItem(n, "IMAGE", f"image {n + 1} of {count}", data=b"png") for n in range(count)]


@pytest.fixture
def run(client):
    """Run so many items over the encoders of a pool."""

    async def run(
        pool, count=2, *, policy=in_turn, patience=PATIENCE, seconds=5.0, describe=costs, **options
    ):
        rng = random.Random(0)
        one = Dispatcher(client, pool, policy, describe=describe, patience=patience, rng=rng)
        return await one.run(REPLY_TO, some_items(count), time.monotonic() + seconds, **options)

    return run


@pytest.fixture
def dispatch(run):
    """The same over these URLs."""
    return lambda urls, count=2, **options: run(ready(*urls), count, **options)


@pytest.fixture
async def two(start):
    return await start(), await start()


def urls(encoders) -> list[str]:
    return [encoder.url for encoder in encoders]


async def test_items_are_spread_with_all_that_an_encoder_needs(two, dispatch):
    await dispatch(urls(two), 5)
    assert [encoder.items for encoder in two] == [[0, 2, 4], [1, 3]]
    for encoder in two:
        (request,) = encoder.requests
        assert (request.reply_to, request.namespace) == (REPLY_TO, "ns")
        assert 4 < request.ttl_s <= 5
        assert all(item.data == b"png" for item in request.items)


async def test_a_policy_hears_how_the_embeddings_that_were_delivered_came_about(start, dispatch):
    class Hearing(Policy):
        def heard(self, key, source):
            told.append((key, source))

    encoder, told = await start(), []
    encoder.says(
        ItemOutcome(0, "delivered", source="cached"),
        ItemOutcome(1, "declined", DECLINE_DUPLICATE),
        ItemOutcome(2, "delivered", source="computed"),
    )
    named = [ItemCost(bytes([number]), 1.0) for number in range(3)]
    await dispatch([encoder.url], 3, policy=Hearing(in_turn), describe=lambda _items: named)
    assert told == [(named[0].key, "cached"), (named[2].key, "computed")]


async def test_the_request_id_does_not_give_the_ticket_away(two, dispatch):
    for _ in range(2):
        await dispatch(urls(two), 2)
    ids = [request.request_id for encoder in two for request in encoder.requests]
    assert all(REPLY_TO.ticket not in request_id for request_id in ids)
    assert all(len({r.request_id for r in encoder.requests}) == 2 for encoder in two)


@pytest.mark.parametrize(
    "fault",
    [
        lambda first: first.refuses(OverloadedError("full")),
        lambda first: first.refuses(UnavailableError("draining")),
        lambda first: first.refuses(FOREIGN),
        lambda first: first.closes(),
        lambda first: first.answers(lambda: web.Response(text="It works!")),
        lambda first: first.says(ItemOutcome(7, "delivered")),
    ],
    ids=["full", "draining", "of another model", "dying", "a stranger", "forgetful"],
)
async def test_what_one_encoder_cannot_do_another_does(two, dispatch, fault):
    first, second = two
    fault(first)
    await dispatch(urls(two), 4)
    assert first.items == [0, 2]
    assert second.items == [1, 3, 0, 2]


async def test_a_retry_does_not_wait_for_the_other_shares(start, dispatch, dead_url):
    slow = await start()
    retried = asyncio.Event()

    async def only_after_the_retry(request):
        if request.items[0].item == 0:
            retried.set()
        await retried.wait()
        return await slow.deliver(request)

    slow.answer = only_after_the_retry
    await dispatch([dead_url, slow.url], 2)
    assert sorted(slow.items) == [0, 1]


async def test_an_item_goes_round_before_it_returns_to_an_encoder(start, dispatch):
    encoders = [await start() for _ in range(3)]
    for encoder in encoders:
        encoder.answers(lambda: web.Response(status=502))
    with pytest.raises(UnavailableError, match="HTTP 502"):
        await dispatch(urls(encoders), 4, seconds=1.0, patience=Patience(1.0, 5.0))
    counts = [encoder.items.count(0) for encoder in encoders]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


async def test_full_encoders_are_not_each_sent_each_item_to_refuse_it(start, dispatch):
    encoders = [await start() for _ in range(8)]
    for encoder in encoders:
        encoder.answers(lambda: FakeEncoder.refusal(OverloadedError("full"), "1"))
    with pytest.raises((OverloadedError, DeadlineError)):
        await dispatch(urls(encoders), 40, seconds=2.0)
    sent = [item for encoder in encoders for item in encoder.items]
    assert all(encoder.items for encoder in encoders)
    # Once at first, and after each Retry-After, which is drawn from 0.5 to 1 s; and each encoder
    # is asked by some whether it is full still. 960 and more where each item went round.
    assert len(sent) < 320


async def test_what_is_heard_of_encoders_sends_nothing_to_those_that_are_full(start, run):
    encoders = [await start() for _ in range(2)]
    for encoder in encoders:
        encoder.answers(lambda: FakeEncoder.refusal(OverloadedError("full"), "20"))
    pool = ready(*urls(encoders))
    running = [asyncio.create_task(run(pool, 1, seconds=60.0)) for _ in range(5)]
    while len(pool._waiters) < 5:
        await asyncio.sleep(0.01)
    asked = sum(len(encoder.requests) for encoder in encoders)
    for _ in range(5):
        pool.failed(encoders[0].url, "silent")
        await asyncio.sleep(0.02)
        pool.heard(encoders[0].url, Report("ns"))
        await asyncio.sleep(0.02)
    assert len(pool._waiters) == 5
    assert sum(len(encoder.requests) for encoder in encoders) == asked
    for encoder in encoders:
        encoder.answer = encoder.deliver
    with pool.attempt(encoders[0].url, 1.0):
        pass  # there is room
    async with asyncio.timeout(5):
        await asyncio.gather(*running)


async def test_an_encoder_that_fails_at_all_it_is_sent_does_not_draw_the_work(two, start, client):
    """Though nothing waits there."""
    sick, sound = two
    failed = EncodeError("out of memory")

    async def fail(request):
        return sick.reply(
            request,
            *(ItemOutcome(one.item, "failed", failed.code, "no") for one in request.items),
        )

    sick.answer = fail
    pool = ready(*urls(two))
    one = Dispatcher(client, pool, policies.policy("least_loaded"), describe=costs)
    for number in range(40):
        with pool.attempt(sound.url, 10.0):  # it has work of others
            await one.run(REPLY_TO, some_items(1), time.monotonic() + 20.0)
        assert len(sound.items) == number + 1
    # Three at first; then one after each second, two, four and so on.
    assert 3 <= len(sick.items) < 10


async def test_a_full_encoder_is_waited_for_though_others_fail(start, run, dead_url):
    """Beyond the patience for encoders that are gone."""
    full = await start()

    async def refuse_at_first(request):
        if len(full.requests) < 4:
            return full.refusal(OverloadedError("full"))
        return await full.deliver(request)

    full.answer = refuse_at_first
    await run(ready(full.url, dead_url), 1, patience=Patience(0.01, 5.0), seconds=20.0)
    assert full.items == [0] * 4


async def test_a_request_to_an_encoder_has_only_so_many_bytes(start, client, monkeypatch):
    monkeypatch.setattr(dispatcher, "MOST_MB", 1)
    encoder = await start()
    media = [bytes(kibibytes << 10) for kibibytes in (400, 1030, 400, 400, 400, 400, 400)]
    items = [EncodeItem(n, "IMAGE", "image", data=data) for n, data in enumerate(media)]
    one = Dispatcher(client, ready(encoder.url), in_turn, describe=costs)
    await one.run(REPLY_TO, items, time.monotonic() + 20.0)
    asked = [[item.item for item in request.items] for request in encoder.requests]
    assert sorted(asked) == [[0], [1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("dead", [False, True])
async def test_where_no_encoder_is_left_one_is_waited_for(start, run, dead_url, dead):
    late, pool = await start(), ready(*[dead_url] * dead)
    running = asyncio.create_task(run(pool, patience=Patience(4.0, 5.0)))
    if dead:
        while pool.state(dead_url) is not Health.SUSPECT:
            await asyncio.sleep(0.01)
        pool.failed(dead_url, "no")
    await asyncio.sleep(0.05)
    assert not running.done()
    pool.add(late.url)
    await running
    assert late.items == [0, 1]


async def test_what_a_silent_encoder_has_goes_elsewhere_once_it_is_given_up(two, run):
    frozen, other = two
    frozen.hangs()
    pool = ready(*urls(two))
    running = asyncio.create_task(run(pool))
    await frozen.asked.wait()
    pool.failed(frozen.url, "silent")
    await asyncio.sleep(0.05)
    assert not running.done(), "one probe without an answer takes nothing away"
    pool.failed(frozen.url, "silent")
    await running
    assert other.items == [1, 0]
    await asyncio.wait_for(frozen.dropped.wait(), 2)
    assert all(one["requests"] == one["patches"] == 0 for one in pool.describe())


async def test_an_encoder_that_is_given_up_as_its_answer_comes_has_answered(
    two, run, client, monkeypatch
):
    pool, encode, complaints = ready(*urls(two)), client.encode, []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: complaints.append(what))

    async def answered(url, *asked):
        reply = await encode(url, *asked)
        for _ in range(2 if url == two[0].url else 0):
            pool.failed(url, "silent")
        return reply

    monkeypatch.setattr(client, "encode", answered)
    await run(pool)
    await asyncio.sleep(0.05)
    assert [encoder.items for encoder in two] == [[0], [1]]
    assert not complaints


async def test_an_encoder_that_takes_too_long_is_not_the_only_one(two, dispatch):
    slow, other = two
    slow.hangs()
    await dispatch(urls(two), 1, patience=Patience(1.0, 0.1))
    assert other.items == [0]


@pytest.mark.parametrize("other", ["none", "full", "silent"])
async def test_an_encoder_that_takes_too_long_is_waited_for_where_there_is_no_other(
    two, run, other
):
    slow, idle = two
    done = asyncio.Event()

    async def deliver_in_the_end(request):
        await done.wait()
        return await slow.deliver(request)

    slow.answer = deliver_in_the_end
    pool = ready(*urls(two)) if other != "none" else ready(slow.url)
    if other == "full":
        with contextlib.suppress(OverloadedError), pool.attempt(idle.url, 1.0):
            raise OverloadedError("full")
    elif other == "silent":
        pool.failed(idle.url, "silent")
    running = asyncio.create_task(run(pool, 1, patience=Patience(1.0, 0.1)))
    await asyncio.sleep(0.4)
    assert not running.done()
    done.set()
    await running
    assert (slow.items, idle.items) == ([0], [])
    assert pool.state(slow.url) is Health.READY


async def test_an_encoder_that_takes_too_long_is_passed_over_once_another_has_come(two, run):
    slow, other = two
    slow.hangs()
    pool = ready(slow.url)
    running = asyncio.create_task(run(pool, 1, patience=Patience(1.0, 0.1)))
    await asyncio.sleep(0.3)
    pool.add(other.url)
    pool.heard(other.url, Report("ns"))
    await running
    assert other.items == [0]


async def test_a_full_encoder_is_asked_again_and_in_the_end_it_has_room(start, dispatch):
    only = await start()
    refusals = 3

    async def refuse_at_first(request):
        nonlocal refusals
        refusals -= 1
        return await only.deliver(request) if refusals < 0 else only.refusal(OverloadedError("x"))

    only.answer = refuse_at_first
    # Being full is no failure: the patience for encoders that are gone does not end it.
    await dispatch([only.url], 1, patience=Patience(0.01, 5.0))
    assert only.items == [0] * 4


@pytest.mark.parametrize("fails", [False, True])
async def test_a_full_encoder_that_is_gone_is_waited_for_as_others_are(start, run, fails):
    """Though there is another, which fails at this item."""
    only, refused = await start(), asyncio.Event()
    urls = [only.url]
    if fails:
        other = await start()
        other.says(ItemOutcome(0, "failed", "EncodeError", "NaN"))
        urls.insert(0, other.url)

    async def refuse(request):
        refused.set()
        return only.refusal(OverloadedError("full"))

    only.answer = refuse
    pool = ready(*urls)
    running = asyncio.create_task(run(pool, 1, patience=Patience(0.1, 5.0), seconds=60.0))
    await refused.wait()
    for _ in range(2):
        pool.failed(only.url, "silent")
    with pytest.raises(UnavailableError, match=r"none of \d encoders can be asked .*silent"):
        await asyncio.wait_for(running, 10)


async def test_an_item_that_the_only_encoder_failed_at_does_not_wait_with_those_that_may_have_room(
    start, dispatch
):
    only = await start()
    only.says(
        ItemOutcome(0, "failed", "OverloadedError", "full"),
        ItemOutcome(1, "failed", "EncodeError", "NaN"),
    )
    with pytest.raises(EncodeError, match="NaN"):
        await asyncio.wait_for(dispatch([only.url], patience=Patience(30.0, 5.0), seconds=60.0), 10)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda one: one.says(ItemOutcome(0, "failed", "EncodeError", "NaN")), "NaN"),
        (lambda one: one.closes(), "^image 1 of 1: 3 encoders ended while they had it$"),
        (
            lambda one: one.says(ItemOutcome(0, "failed", EncoderLostError.__name__, "broken")),
            "3 encoders ended while they had it",
        ),
    ],
    ids=["fails", "ends", "breaks"],
)
async def test_an_item_that_no_encoder_can_do_does_not_have_them_all(
    start, dispatch, fault, message
):
    encoders = [await start() for _ in range(5)]
    for encoder in encoders:
        fault(encoder)
    with pytest.raises(EncodeError, match=message):
        await dispatch(urls(encoders), 1)
    assert sum(len(encoder.items) for encoder in encoders) == 3


async def test_a_hundred_requests_on_small_encoders_all_come_through(two, run):
    for encoder in two:
        room = asyncio.Semaphore(4)

        async def answer(request, encoder=encoder, room=room):
            if room.locked():
                return encoder.refusal(OverloadedError("full"), "1")
            async with room:
                await asyncio.sleep(0.01)
                return await encoder.deliver(request)

        encoder.answer = answer
    pool = ready(*urls(two))
    await asyncio.gather(*(run(pool, policy=Policy(shuffle), seconds=20) for _ in range(100)))
    assert min(len(encoder.items) for encoder in two) > 0


async def test_a_url_that_is_listed_twice_counts_once(two, dispatch):
    twice, once = two
    await dispatch([twice.url, twice.url, once.url], 4)
    assert (twice.items, once.items) == ([0, 2], [1, 3])


@pytest.mark.parametrize(
    ("outcome", "error", "message"),
    [
        *(
            (ItemOutcome(0, "failed", kind.__name__, "cannot be"), kind, "cannot be")
            for kind in (MediaError, MediaTypeError, MediaTooLargeError)
        ),
        (ItemOutcome(0, "declined", DECLINE_TOO_LARGE), MediaTooLargeError, "its embedding .*"),
    ],
)
async def test_what_the_media_did_wrong_is_not_tried_elsewhere(
    two, dispatch, outcome, error, message
):
    first, second = two
    first.says(outcome)
    with pytest.raises(error, match=rf"^image 1 of 1: {message}$") as raised:
        await dispatch(urls(two), 1)
    assert type(raised.value) is error
    assert second.items == []


async def test_a_hopeless_item_cancels_the_other_shares_at_once(two, dispatch):
    broken, slow = two
    slow.hangs()

    async def fail_once_the_other_works(request):
        await slow.asked.wait()
        return broken.reply(request, ItemOutcome(0, "failed", "MediaError", "broken"))

    broken.answer = fail_once_the_other_works
    started = time.monotonic()
    with pytest.raises(MediaError, match="broken"):
        await dispatch(urls(two), 2, seconds=60.0)
    await asyncio.wait_for(slow.dropped.wait(), 5)
    assert time.monotonic() - started < 5


async def test_only_encoders_of_another_model_are_an_error_that_shows_both(start, dispatch):
    foreign = await start()
    foreign.refuses(FOREIGN)
    with pytest.raises(NamespaceError, match="has A, this encoder B"):
        await dispatch([foreign.url], 1)


async def test_an_encoder_that_refuses_the_token_is_asked_once(start, run):
    stranger = await start()
    stranger.answers(lambda: web.Response(status=401))
    pool = ready(stranger.url)
    for _ in range(3):
        with pytest.raises(UnavailableError, match="refused this server's SGLANG_EPD_TOKEN"):
            await run(pool, patience=Patience(60.0, 5.0), seconds=60.0)
        pool.heard(stranger.url, Report("ns"))
    assert len(stranger.requests) == 1


async def test_an_encoder_that_cannot_reach_this_server_is_left_alone(two, run):
    first, second = two
    text = "cannot connect to the payload port of a language server"
    first.says(*(ItemOutcome(n, "failed", UnreachableError.__name__, text) for n in (0, 2)))
    pool = ready(first.url, second.url)
    for _ in range(3):
        await run(pool, 4)
        pool.heard(first.url, Report("ns"))
    assert (len(first.requests), pool.state(first.url)) == (1, Health.MISFIT)
    pool.remove(second.url, STATIC)
    port = REPLY_TO.endpoint.rpartition("@")[2]
    assert port in pool.describe()[0]["why"]
    with pytest.raises(UnavailableError, match=f"{first.url}: misfit, .* cannot connect to"):
        await run(pool, patience=Patience(0.2, 5.0), seconds=60.0)


async def test_an_encoder_that_is_well_and_fails_all_the_same_is_asked_less_and_less(start, run):
    behind_a_proxy = await start()
    behind_a_proxy.answers(lambda: web.Response(status=502))
    pool = ready(behind_a_proxy.url)
    loop = asyncio.get_running_loop()
    pool.listen(lambda url: loop.call_later(0.01, pool.heard, url, Report("ns")))
    with pytest.raises(UnavailableError, match="answered HTTP 502"):
        await run(pool, 1, patience=Patience(2.0, 5.0))
    assert 3 < len(behind_a_proxy.requests) < 20


async def test_a_hanging_encoder_ends_the_request_at_its_deadline(two, dispatch):
    hanging, _ = two
    hanging.hangs()
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        await dispatch(urls(two), 2, seconds=0.3)
    assert 0.29 <= time.monotonic() - started < 10
    await asyncio.wait_for(hanging.dropped.wait(), 5)


async def test_a_retry_has_only_what_is_left_of_the_deadline(two, dispatch):
    slow, second = two

    async def refuse_late(_request):
        await asyncio.sleep(0.2)
        return web.Response(status=503)

    slow.answer = refuse_late
    await dispatch(urls(two), 1, seconds=10.0)
    assert second.requests[0].ttl_s < 9.85


async def test_a_deadline_that_has_passed_asks_nobody(start, dispatch):
    encoder = await start()
    with pytest.raises(DeadlineError, match="passed before"):
        await dispatch([encoder.url], 1, seconds=-1.0)
    assert encoder.items == []


async def test_without_encoders_the_request_is_unavailable_and_nothing_is_done(dispatch):
    await dispatch([], 0)
    with pytest.raises(UnavailableError, match="no encoder is known"):
        await dispatch([], 2)


@pytest.mark.parametrize("reason", [DECLINE_CANCELLED, DECLINE_DUPLICATE])
async def test_what_our_receiver_declined_needs_nothing_more(two, dispatch, reason):
    first, second = two
    first.says(ItemOutcome(0, "declined", reason))
    await dispatch(urls(two), 1)
    assert second.items == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [(DECLINE_UNKNOWN, "does not know"), (DECLINE_UNREADABLE, "cannot read what encoder http")],
)
async def test_a_request_that_our_receiver_did_not_take_is_not_left_waiting(
    start, dispatch, reason, told
):
    encoder = await start()
    encoder.says(ItemOutcome(0, "declined", reason))
    with pytest.raises(EncodeError, match=rf"image 1 of 1: .* {told}"):
        await dispatch([encoder.url], 1)


async def test_cancelling_closes_every_connection(two, dispatch):
    for encoder in two:
        encoder.hangs()
    before = asyncio.all_tasks()
    run = asyncio.create_task(dispatch(urls(two)))
    for encoder in two:
        await asyncio.wait_for(encoder.asked.wait(), 5)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    for encoder in two:
        await asyncio.wait_for(encoder.dropped.wait(), 5)
    left = [task for task in asyncio.all_tasks() - before if "_serve" in repr(task.get_coro())]
    assert not left


def layout(rows: int = 6, modality: str = "IMAGE") -> Layout:
    return Layout(modality, TensorSpec("float32", (rows, 4)), [[1, 1, 6]])


def key(number: int) -> bytes:
    return bytes([number]) * 32


async def test_it_returns_the_layouts_that_were_told(two, dispatch):
    first, second = two
    first.says(
        ItemOutcome(0, "delivered", layout=layout(1), key=key(0)),
        ItemOutcome(2, "delivered"),
        # Of an item that goes to the second encoder.
        ItemOutcome(4, "failed", EncodeError.__name__, "x", layout=layout(9), key=key(9)),
    )
    second.says(
        ItemOutcome(1, "declined", DECLINE_DUPLICATE, layout=layout(2), key=key(1)),
        ItemOutcome(3, "delivered"),
        ItemOutcome(4, "delivered", layout=layout(3), key=key(4)),
    )
    assert await dispatch(urls(two), 5) == {
        0: ItemLayout(key(0), layout(1)),
        1: ItemLayout(key(1), layout(2)),
        4: ItemLayout(key(4), layout(3)),
    }


@pytest.mark.parametrize(
    ("told", "told_key"),
    [(layout(0), key(0)), (layout(), b"short"), (layout(modality="AUDIO"), key(0))],
)
async def test_a_layout_that_cannot_be_is_no_layout(start, dispatch, told, told_key):
    encoder = await start()
    encoder.says(ItemOutcome(0, "delivered", layout=told, key=told_key))
    assert await dispatch([encoder.url], 1) == {}


async def test_more_items_than_an_encoder_may_have_at_a_time_come_through(two, dispatch):
    """One picture, over a thousand times in a request: a policy sends it to one encoder."""
    for encoder in two:
        admission = Admission(1024, 1 << 30)

        async def answer(request, encoder=encoder, admission=admission):
            try:
                admission.admit(request.request_id, len(request.items))
            except EpdError as error:
                return encoder.refusal(error, "1")
            await asyncio.sleep(0.05)
            admission.leave(request.request_id)
            return await encoder.deliver(request)

        encoder.answer = answer
    await dispatch(urls(two), 1500, policy=Affinity(), seconds=30)
    assert {number for encoder in two for number in encoder.items} == set(range(1500))


@pytest.mark.parametrize("encoders", [1, 2])
async def test_a_large_request_has_only_so_much_at_an_encoder_at_a_time(start, dispatch, encoders):
    several = [await start() for _ in range(encoders)]
    live, most, described = 0, 0, []

    async def answer(request):
        nonlocal live, most
        live += len(request.items)
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= len(request.items)
        return await several[0].deliver(request)

    def describe(items):
        described.append(len(items))
        return costs(items)

    for one in several:
        one.answer = answer
    await dispatch(urls(several), 768, describe=describe, seconds=30)
    assert sorted(item for one in several for item in one.items) == list(range(768))
    # As many as fill batches, and no more.
    assert 64 * encoders < most <= 128 * encoders
    assert max(described) <= 128 * encoders


async def test_after_a_hopeless_item_nothing_more_is_sent(start, dispatch, caplog):
    encoder = await start()

    async def answer(request):
        if request.items[0].item:
            await asyncio.Event().wait()
        # It says nothing of those that it gave up for this one.
        return encoder.reply(request, ItemOutcome(5, "failed", "MediaError", "cannot be decoded"))

    encoder.answer = answer
    with pytest.raises(MediaError, match=r"^image 6 of 4096: cannot be decoded$"):
        await dispatch([encoder.url], 4096)
    assert len(encoder.items) <= 128
    assert "elsewhere" not in caplog.text


async def test_media_that_an_encoder_refused_are_gone_with_their_request(two, client):
    """Without waiting for a collection of cycles."""
    media = bytes([1, 2, 3]) * 1000
    before = sys.getrefcount(media)
    two[0].refuses(OverloadedError("full"))
    one = Dispatcher(client, ready(*urls(two)), in_turn, describe=costs)
    gc.disable()
    try:
        items = [EncodeItem(n, "IMAGE", f"image {n + 1} of 2", data=media) for n in range(2)]
        await one.run(REPLY_TO, items, time.monotonic() + 5.0)
        del items
        assert two[1].items == [1, 0]
        assert sys.getrefcount(media) == before
    finally:
        gc.enable()
