from __future__ import annotations

import asyncio
import random
import time

import pytest
from aiohttp import web

from sglang_epd.dispatch.dispatcher import Dispatcher, Patience
from sglang_epd.dispatch.policies import Affinity, ItemCost, shuffle
from sglang_epd.dispatch.pool import Health, Pool, Report
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
)
from sglang_epd.wire.http import (
    EncodeItem,
    EncodeReply,
    ErrorReply,
    ItemLayout,
    ItemOutcome,
    ReplyTo,
    encode_body,
)
from sglang_epd.wire.messages import (
    DECLINE_CANCELLED,
    DECLINE_DUPLICATE,
    DECLINE_TOO_LARGE,
    DECLINE_UNKNOWN,
    Layout,
    TensorSpec,
)

REPLY_TO = ReplyTo("tcp://127.0.0.1:1", "the-secret-ticket")


PATIENCE = Patience(0.3, 5.0)


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


def dispatcher(client, pool, policy=in_turn, patience=PATIENCE) -> Dispatcher:
    return Dispatcher(
        client,
        pool,
        policy,
        describe=lambda items: [ItemCost(b"", 1.0) for _ in items],
        patience=patience,
        rng=random.Random(0),
    )


def some_items(count: int) -> list[EncodeItem]:
    return [EncodeItem(n, "IMAGE", f"image {n + 1} of {count}", data=b"png") for n in range(count)]


def has_room_for(requests: int):
    """An encoder's answers, that takes 10 ms for each and only so many at a time."""
    live = 0

    async def answer(request):
        nonlocal live
        if live >= requests:
            body = encode_body(ErrorReply("OverloadedError", "full"))
            return web.Response(body=body, status=503, headers={"Retry-After": "1"})
        live += 1
        await asyncio.sleep(0.01)
        live -= 1
        outcomes = [ItemOutcome(item.item, "delivered") for item in request.items]
        return web.Response(body=encode_body(EncodeReply(request.request_id, "it", outcomes)))

    return answer


@pytest.fixture
def dispatch(client):
    """Run so many items over these URLs."""

    async def run(urls, count=2, *, policy=in_turn, seconds=5.0):
        one = dispatcher(client, ready(*urls), policy)
        return await one.run(REPLY_TO, some_items(count), time.monotonic() + seconds)

    return run


async def test_items_are_spread_with_all_that_an_encoder_needs(start, dispatch):
    encoders = [await start(), await start()]
    await dispatch([encoder.url for encoder in encoders], 5)
    assert [encoder.items for encoder in encoders] == [[0, 2, 4], [1, 3]]
    for encoder in encoders:
        (request,) = encoder.requests
        assert (request.reply_to, request.namespace) == (REPLY_TO, "ns")
        assert 4 < request.ttl_s <= 5
        assert all(item.data == b"png" for item in request.items)


async def test_the_request_id_does_not_give_the_ticket_away(start, dispatch):
    encoders = [await start(), await start()]
    for _ in range(2):
        await dispatch([encoder.url for encoder in encoders], 2)
    ids = [request.request_id for encoder in encoders for request in encoder.requests]
    assert all(REPLY_TO.ticket not in request_id for request_id in ids)
    assert all(len({r.request_id for r in encoder.requests}) == 2 for encoder in encoders)


async def test_items_of_a_dead_encoder_go_to_another_and_only_those(start, dispatch, dead_url):
    encoder = await start()
    await dispatch([dead_url, encoder.url], 4)
    assert encoder.items == [1, 3, 0, 2]
    assert len(encoder.requests) == 2
    assert len({request.request_id for request in encoder.requests}) == 2


async def test_a_retry_does_not_wait_for_the_other_shares(start, dispatch, dead_url):
    slow = await start()
    deliver, retried = slow.answer, asyncio.Event()

    async def only_after_the_retry(request):
        if request.items[0].item == 0:
            retried.set()
        await retried.wait()
        return await deliver(request)

    slow.answer = only_after_the_retry
    await dispatch([dead_url, slow.url], 2)
    assert sorted(slow.items) == [0, 1]


@pytest.mark.parametrize("error", [OverloadedError("full"), UnavailableError("draining")])
async def test_a_refusal_of_the_moment_is_tried_elsewhere(start, dispatch, error):
    full, free = await start(), await start()
    full.refuses(error)
    await dispatch([full.url, free.url], 3)
    assert full.items == [0, 2]
    assert free.items == [1, 0, 2]


async def test_one_failed_item_is_tried_elsewhere_alone(start, dispatch):
    first, second = await start(), await start()
    first.says(
        ItemOutcome(0, "failed", EncodeError.__name__, "out of memory"), ItemOutcome(2, "delivered")
    )
    await dispatch([first.url, second.url], 4)
    assert second.items == [1, 3, 0]


async def test_an_item_goes_round_before_it_returns_to_an_encoder(start, dispatch):
    encoders = [await start() for _ in range(3)]
    for encoder in encoders:
        encoder.refuses(OverloadedError("full"))
    with pytest.raises(OverloadedError, match="full"):
        await dispatch([encoder.url for encoder in encoders], 4, seconds=1.0)
    counts = [encoder.items.count(0) for encoder in encoders]
    assert max(counts) - min(counts) <= 1 and min(counts) >= 1


async def test_an_encoder_that_joins_meanwhile_helps(start, client):
    full, late = await start(), await start()
    pool = ready(full.url)

    async def refuse_and_let_join(_request):
        pool.add(late.url)
        return web.Response(status=503)

    full.answer = refuse_and_let_join
    await dispatcher(client, pool).run(REPLY_TO, some_items(1), time.monotonic() + 5)
    assert late.items == [0]


async def test_without_an_encoder_one_is_waited_for(start, client):
    late, pool = await start(), ready()
    one = dispatcher(client, pool, patience=Patience(4.0, 5.0))
    running = asyncio.create_task(one.run(REPLY_TO, some_items(2), time.monotonic() + 5))
    await asyncio.sleep(0.05)
    assert not running.done()
    pool.add(late.url)
    await running
    assert late.items == [0, 1]


async def test_when_all_have_failed_the_one_that_recovers_is_used(start, client, dead_url):
    late, pool = await start(), ready(dead_url)
    one = dispatcher(client, pool, patience=Patience(4.0, 5.0))
    running = asyncio.create_task(one.run(REPLY_TO, some_items(1), time.monotonic() + 5))
    while pool.state(dead_url) is not Health.SUSPECT:
        await asyncio.sleep(0.01)
    pool.failed(dead_url, "no")
    await asyncio.sleep(0.05)
    assert not running.done()
    pool.add(late.url)
    await running
    assert late.items == [0]


async def test_what_a_silent_encoder_has_goes_elsewhere_once_it_is_given_up(start, client):
    frozen, other = await start(), await start()
    frozen.hangs()
    pool = ready(frozen.url, other.url)
    running = asyncio.create_task(
        dispatcher(client, pool).run(REPLY_TO, some_items(2), time.monotonic() + 5)
    )
    await frozen.asked.wait()
    pool.failed(frozen.url, "silent")
    await asyncio.sleep(0.05)
    assert not running.done(), "one probe without an answer takes nothing away"
    pool.failed(frozen.url, "silent")
    await running
    assert other.items == [1, 0]
    await asyncio.wait_for(frozen.dropped.wait(), 2)
    assert all(one["requests"] == one["patches"] == 0 for one in pool.describe())


async def test_an_encoder_that_takes_too_long_is_not_the_only_one(start, client):
    slow, other = await start(), await start()
    slow.hangs()
    one = dispatcher(client, ready(slow.url, other.url), patience=Patience(1.0, 0.1))
    await one.run(REPLY_TO, some_items(1), time.monotonic() + 5)
    assert other.items == [0]


async def test_a_full_encoder_is_asked_again_and_in_the_end_it_has_room(start, client):
    only = await start()
    deliver, refusals = only.answer, 3

    async def refuse_at_first(request):
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            body = encode_body(ErrorReply("OverloadedError", "full"))
            return web.Response(body=body, status=503)
        return await deliver(request)

    only.answer = refuse_at_first
    # Being full is no failure: the patience for encoders that are gone does not end it.
    one = dispatcher(client, ready(only.url), patience=Patience(0.01, 5.0))
    await one.run(REPLY_TO, some_items(1), time.monotonic() + 5)
    assert only.items == [0] * 4


async def test_an_item_that_every_encoder_fails_at_is_given_up(start, dispatch):
    encoders = [await start() for _ in range(5)]
    for encoder in encoders:
        encoder.says(ItemOutcome(0, "failed", EncodeError.__name__, "NaN"))
    with pytest.raises(EncodeError, match="NaN"):
        await dispatch([encoder.url for encoder in encoders], 1)
    assert sum(len(encoder.items) for encoder in encoders) == 3


async def test_an_item_that_ends_encoders_does_not_have_them_all(start, client):
    encoders = [await start() for _ in range(5)]

    for encoder in encoders:
        encoder.closes()
    one = dispatcher(client, ready(*(encoder.url for encoder in encoders)))
    with pytest.raises(EncodeError, match=r"^image 1 of 1: 3 encoders ended while they had it$"):
        await one.run(REPLY_TO, some_items(1), time.monotonic() + 5)
    assert sum(len(encoder.items) for encoder in encoders) == 3


async def test_an_item_that_breaks_encoders_does_not_have_them_all(start, dispatch):
    encoders = [await start() for _ in range(5)]
    for encoder in encoders:
        encoder.says(ItemOutcome(0, "failed", EncoderLostError.__name__, "its tower is broken"))
    with pytest.raises(EncodeError, match="3 encoders ended while they had it"):
        await dispatch([encoder.url for encoder in encoders], 1)
    assert sum(len(encoder.items) for encoder in encoders) == 3


async def test_a_hundred_requests_on_small_encoders_all_come_through(start, client):
    encoders = [await start() for _ in range(2)]
    for encoder in encoders:
        encoder.answer = has_room_for(4)
    one = dispatcher(client, ready(*(encoder.url for encoder in encoders)), shuffle)
    deadline = time.monotonic() + 20
    await asyncio.gather(*(one.run(REPLY_TO, some_items(2), deadline) for _ in range(100)))
    assert min(len(encoder.items) for encoder in encoders) > 0


async def test_a_url_that_is_listed_twice_counts_once(start, dispatch):
    twice, once = await start(), await start()
    await dispatch([twice.url, twice.url, once.url], 4)
    assert (twice.items, once.items) == ([0, 2], [1, 3])


@pytest.mark.parametrize("error", [MediaError, MediaTypeError, MediaTooLargeError])
async def test_what_the_media_did_wrong_is_not_tried_elsewhere(start, dispatch, error):
    first, second = await start(), await start()
    first.says(ItemOutcome(0, "failed", error.__name__, "cannot be decoded"))
    with pytest.raises(error, match=r"^image 1 of 1: cannot be decoded$") as raised:
        await dispatch([first.url, second.url], 1)
    assert type(raised.value) is error
    assert second.items == []


async def test_a_hopeless_item_cancels_the_other_shares_at_once(start, dispatch):
    broken, slow = await start(), await start()
    slow.hangs()

    async def fail_once_the_other_works(request):
        await slow.asked.wait()
        outcome = ItemOutcome(0, "failed", "MediaError", "broken")
        return web.Response(body=encode_body(EncodeReply(request.request_id, "it", [outcome])))

    broken.answer = fail_once_the_other_works
    started = time.monotonic()
    with pytest.raises(MediaError, match="broken"):
        await dispatch([broken.url, slow.url], 2, seconds=60.0)
    await asyncio.wait_for(slow.dropped.wait(), 5)
    assert time.monotonic() - started < 5


async def test_an_encoder_of_another_model_is_passed_over(start, dispatch):
    foreign, ours = await start(), await start()
    foreign.refuses(NamespaceError("the language server has A, this encoder B"))
    await dispatch([foreign.url, ours.url], 1)
    assert ours.items == [0]


async def test_only_encoders_of_another_model_are_an_error_that_shows_both(start, dispatch):
    foreign = await start()
    foreign.refuses(NamespaceError("the language server has A, this encoder B"))
    with pytest.raises(NamespaceError, match="has A, this encoder B"):
        await dispatch([foreign.url], 1)


async def test_a_hanging_encoder_ends_the_request_at_its_deadline(start, dispatch):
    hanging, other = await start(), await start()
    hanging.hangs()
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        await dispatch([hanging.url, other.url], 2, seconds=0.3)
    assert 0.29 <= time.monotonic() - started < 2
    await asyncio.wait_for(hanging.dropped.wait(), 5)


async def test_a_retry_has_only_what_is_left_of_the_deadline(start, dispatch):
    slow, second = await start(), await start()

    async def refuse_late(_request):
        await asyncio.sleep(0.2)
        return web.Response(status=503)

    slow.answer = refuse_late
    await dispatch([slow.url, second.url], 1, seconds=1.0)
    assert second.requests[0].ttl_s < 0.85


async def test_a_deadline_that_has_passed_asks_nobody(start, dispatch):
    encoder = await start()
    with pytest.raises(DeadlineError, match="passed before"):
        await dispatch([encoder.url], 1, seconds=-1.0)
    assert encoder.items == []


async def test_without_encoders_the_request_is_unavailable(dispatch):
    with pytest.raises(UnavailableError, match="no encoder is known"):
        await dispatch([], 2)


async def test_a_reply_that_is_not_ours_is_tried_elsewhere(start, dispatch):
    stranger, encoder = await start(), await start()
    stranger.answers(lambda: web.Response(text="It works!"))
    await dispatch([stranger.url, encoder.url], 2)
    assert encoder.items == [1, 0]


async def test_an_item_without_an_outcome_is_tried_elsewhere(start, dispatch):
    forgetful, encoder = await start(), await start()
    forgetful.says(ItemOutcome(7, "delivered"))
    await dispatch([forgetful.url, encoder.url], 2)
    assert encoder.items == [1, 0]


@pytest.mark.parametrize("reason", [DECLINE_CANCELLED, DECLINE_DUPLICATE])
async def test_what_our_receiver_declined_needs_nothing_more(start, dispatch, reason):
    first, second = await start(), await start()
    first.says(ItemOutcome(0, "declined", reason))
    await dispatch([first.url, second.url], 1)
    assert second.items == []


async def test_a_request_that_our_receiver_forgot_is_not_left_waiting(start, dispatch):
    encoder = await start()
    encoder.says(ItemOutcome(0, "declined", DECLINE_UNKNOWN))
    with pytest.raises(EncodeError, match=r"image 1 of 1: .* does not know"):
        await dispatch([encoder.url], 1)


async def test_an_embedding_larger_than_our_receiver_takes_is_an_error(start, dispatch):
    first, second = await start(), await start()
    first.says(ItemOutcome(0, "declined", DECLINE_TOO_LARGE))
    with pytest.raises(MediaTooLargeError, match="image 1 of 1"):
        await dispatch([first.url, second.url], 1)
    assert second.items == []


async def test_cancelling_closes_every_connection(start, dispatch):
    encoders = [await start(), await start()]
    for encoder in encoders:
        encoder.hangs()
    before = asyncio.all_tasks()
    run = asyncio.create_task(dispatch([encoder.url for encoder in encoders], 2))
    for encoder in encoders:
        await asyncio.wait_for(encoder.asked.wait(), 5)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    for encoder in encoders:
        await asyncio.wait_for(encoder.dropped.wait(), 5)
    left = [task for task in asyncio.all_tasks() - before if "_send" in repr(task.get_coro())]
    assert not left


async def test_nothing_to_do_is_done(dispatch):
    await dispatch([], 0)


def layout(rows: int = 6, modality: str = "IMAGE") -> Layout:
    return Layout(modality, TensorSpec("float32", (rows, 4)), [[1, 1, 6]])


def key(number: int) -> bytes:
    return bytes([number]) * 32


async def test_it_returns_the_layouts_that_were_told(start, dispatch):
    first, second = await start(), await start()
    first.says(
        ItemOutcome(0, "delivered", layout=layout(1), key=key(0)), ItemOutcome(2, "delivered")
    )
    second.says(ItemOutcome(1, "declined", DECLINE_DUPLICATE, layout=layout(2), key=key(1)))
    assert await dispatch([first.url, second.url], 3) == {
        0: ItemLayout(key(0), layout(1)),
        1: ItemLayout(key(1), layout(2)),
    }


async def test_a_layout_may_come_from_the_second_encoder(start, dispatch):
    first, second = await start(), await start()
    first.says(ItemOutcome(0, "failed", EncodeError.__name__, "x", layout=layout(9), key=key(9)))
    second.says(ItemOutcome(0, "delivered", layout=layout(1), key=key(0)))
    assert await dispatch([first.url, second.url], 1) == {0: ItemLayout(key(0), layout(1))}


@pytest.mark.parametrize(
    ("told", "told_key"),
    [(layout(0), key(0)), (layout(), b"short"), (layout(modality="AUDIO"), key(0))],
)
async def test_a_layout_that_cannot_be_is_no_layout(start, dispatch, told, told_key):
    encoder = await start()
    encoder.says(ItemOutcome(0, "delivered", layout=told, key=told_key))
    assert await dispatch([encoder.url], 1) == {}


async def test_more_items_than_an_encoder_may_have_at_a_time_come_through(start, client):
    """One picture, over a thousand times in a request: a policy sends it to one encoder."""
    encoders = [await start(), await start()]
    for encoder in encoders:
        admission = Admission(1024, 1 << 30)

        async def answer(request, admission=admission):
            try:
                admission.admit(request.request_id, len(request.items))
            except EpdError as error:
                body = encode_body(ErrorReply(error.code, error.message))
                return web.Response(body=body, status=error.status, headers={"Retry-After": "1"})
            await asyncio.sleep(0.05)
            admission.leave(request.request_id)
            outcomes = [ItemOutcome(item.item, "delivered") for item in request.items]
            return web.Response(body=encode_body(EncodeReply(request.request_id, "it", outcomes)))

        encoder.answer = answer
    one = dispatcher(client, ready(*(encoder.url for encoder in encoders)), Affinity())
    await one.run(REPLY_TO, some_items(1500), time.monotonic() + 30)
    assert {number for encoder in encoders for number in encoder.items} == set(range(1500))


@pytest.mark.parametrize("encoders", [1, 2])
async def test_a_large_request_has_only_so_much_at_an_encoder_at_a_time(start, client, encoders):
    several = [await start() for _ in range(encoders)]
    live, most, described = 0, 0, []

    async def answer(request):
        nonlocal live, most
        live += len(request.items)
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= len(request.items)
        outcomes = [ItemOutcome(item.item, "delivered") for item in request.items]
        return web.Response(body=encode_body(EncodeReply(request.request_id, "it", outcomes)))

    def describe(items):
        described.append(len(items))
        return [ItemCost(b"", 1.0) for _ in items]

    for one in several:
        one.answer = answer
    pool = ready(*(one.url for one in several))
    sending = Dispatcher(client, pool, in_turn, describe=describe, patience=PATIENCE)
    await sending.run(REPLY_TO, some_items(768), time.monotonic() + 30)
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
        outcome = ItemOutcome(5, "failed", "MediaError", "cannot be decoded")
        return web.Response(body=encode_body(EncodeReply(request.request_id, "it", [outcome])))

    encoder.answer = answer
    with pytest.raises(MediaError, match=r"^image 6 of 4096: cannot be decoded$"):
        await dispatch([encoder.url], 4096)
    assert len(encoder.items) <= 128
    assert "elsewhere" not in caplog.text
