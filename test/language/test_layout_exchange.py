"""The route and the client, over real sockets; the board is written by another thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

import sites
from sglang_epd.errors import DeadlineError, MediaTooLargeError, UnavailableError
from sglang_epd.language import layout_exchange
from sglang_epd.language.layout_exchange import PATH, LayoutClient, LayoutRoute, authorization
from sglang_epd.language.layouts import Board
from sglang_epd.trust import Trust
from sglang_epd.wire.http import CONTENT_TYPE, LayoutReply, encode_body

ROOM = 2**63 - 1
TTL_S = 30.0
Serve = Callable[..., Awaitable[int]]


@pytest.fixture
def board():
    return Board()


@pytest.fixture
async def serve(board):
    """Serve the board; returns the port."""
    async with AsyncExitStack() as stack:

        async def start(handler=None, **options) -> int:
            options = {"trust": Trust("secret"), "poll_s": 0.1, "unheard_of_s": 0.1, **options}
            app = web.Application()
            app.router.add_get(PATH, handler or LayoutRoute(board, **options).handle)
            served = sites.up(app, handler_cancellation=True)
            return int((await stack.enter_async_context(served)).rpartition(":")[2])

        yield start


@pytest.fixture
async def client():
    client = LayoutClient("secret", 5.0)
    yield client
    await client.close()


def in_a_thread(work: Callable[[], None], after_s: float) -> None:
    threading.Timer(after_s, work).start()


async def test_what_is_known_is_told(board, serve, client, described):
    board.open(ROOM, TTL_S).learnt([described("a"), described("b")])
    assert await client.ask("127.0.0.1", await serve(), ROOM) == [described("a"), described("b")]


async def test_who_asks_before_the_prefill_has_heard_of_it_waits(board, serve, client, described):
    port = await serve(unheard_of_s=30.0, poll_s=30.0)
    slots = []
    in_a_thread(lambda: slots.append(board.open(ROOM, TTL_S)), 0.1)
    in_a_thread(lambda: slots[0].learnt([described()]), 0.3)
    begin = time.monotonic()
    assert await client.ask("127.0.0.1", port, ROOM) == [described()]
    assert time.monotonic() - begin < 15
    assert not board._watchers


async def test_who_waits_longer_than_a_poll_asks_again(board, serve, client, described):
    slot = board.open(ROOM, TTL_S)
    in_a_thread(lambda: slot.learnt([described()]), 0.4)
    assert await client.ask("127.0.0.1", await serve(poll_s=0.1), ROOM) == [described()]


async def test_a_request_that_failed_is_that_error(board, serve, client):
    board.open(ROOM, TTL_S).failed(MediaTooLargeError("image 1 of 1: 900 megapixels"))
    with pytest.raises(MediaTooLargeError, match="900 megapixels"):
        await client.ask("127.0.0.1", await serve(), ROOM)


async def test_an_unheard_of_room_is_an_error(board, serve, client):
    with pytest.raises(UnavailableError, match="knows nothing of this request"):
        await client.ask("127.0.0.1", await serve(), ROOM)
    assert not board._watchers


async def test_layouts_that_will_not_be_known_are_none(board, serve, client, described):
    board.open(ROOM, TTL_S).learnt([described(), None])
    assert await client.ask("127.0.0.1", await serve(), ROOM) is None


async def test_the_deadline_ends_the_question(board, serve):
    board.open(ROOM, TTL_S)
    impatient = LayoutClient("secret", 0.3)
    begin = time.monotonic()
    with pytest.raises(DeadlineError):
        await impatient.ask("127.0.0.1", await serve(), ROOM)
    assert time.monotonic() - begin < 15
    await impatient.close()


async def test_a_proof_is_good_for_its_room_only_and_is_not_the_token(board, serve, described):
    board.open(ROOM, TTL_S).learnt([described()])
    port = await serve()
    url = f"http://127.0.0.1:{port}/epd/layouts/{ROOM}"
    async with aiohttp.ClientSession() as session:
        for given, status in (
            (authorization("secret", ROOM), 200),
            (authorization("secret", 1), 401),
            ("Bearer secret", 401),
            ("Bearer ü", 401),
        ):
            async with session.get(url, headers={"Authorization": given}) as response:
                assert response.status == status
    assert "secret" not in authorization("secret", ROOM)


async def test_the_servers_token_counts_and_no_other(board, serve, described):
    board.open(ROOM, TTL_S).learnt([described()])
    port = await serve(trust=Trust("token"))
    for token in ("token", "other", ""):
        client = LayoutClient(token, 5.0)
        if token == "token":
            assert await client.ask("127.0.0.1", port, ROOM) == [described()]
        else:
            with pytest.raises(UnavailableError, match="does not take this server's token"):
                await client.ask("127.0.0.1", port, ROOM)
        await client.close()


async def test_a_header_that_is_no_text_proves_nothing(serve):
    reader, writer = await asyncio.open_connection("127.0.0.1", await serve())
    writer.write(
        b"GET /epd/layouts/%d HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xff\xfe\r\n\r\n" % ROOM
    )
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()


async def test_where_no_token_is_set_none_is_asked_for(board, serve, client, described):
    board.open(ROOM, TTL_S).learnt([described()])
    assert await client.ask("127.0.0.1", await serve(trust=Trust()), ROOM) == [described()]


async def test_a_server_without_the_route_knows_nothing(client):
    async with sites.up(web.Application()) as url:
        assert await client.ask("127.0.0.1", URL(url).port, ROOM) is None


async def test_where_no_server_answers_there_is_an_error(
    serve, client, unused_tcp_port, monkeypatch
):
    monkeypatch.setattr(layout_exchange, "_UNANSWERED_S", -1.0)
    port = await serve()
    for where in (
        ("127.0.0.1", unused_tcp_port),
        ("no such host", port),
        ("127.0.0.1", -5),
        ("127.0.0.1", 70_000),
    ):
        with pytest.raises(UnavailableError, match="does not answer"):
            await client.ask(*where, ROOM)


async def test_a_server_that_does_not_answer_is_asked_again(
    board, client, described, unused_tcp_port
):
    """One that a fetch by this server's own loader would take the place of."""
    board.open(ROOM, TTL_S).learnt([described()])
    asking = asyncio.create_task(client.ask("127.0.0.1", unused_tcp_port, ROOM))
    await asyncio.sleep(0.2)
    assert not asking.done()
    app = web.Application()
    app.router.add_get(PATH, LayoutRoute(board, Trust("secret")).handle)
    async with sites.up(app, unused_tcp_port):
        assert await asking == [described()]


async def test_a_question_that_stays_without_an_answer_is_asked_once_more(
    serve, client, described, monkeypatch
):
    """Of a server that was frozen for a while; `_UNANSWERED_S` is over by then."""
    monkeypatch.setattr(layout_exchange, "POLL_S", 1.0)
    monkeypatch.setattr(layout_exchange, "_SLACK_S", 1.0)
    monkeypatch.setattr(layout_exchange, "_UNANSWERED_S", 1.0)
    monkeypatch.setattr(layout_exchange, "_AGAIN_S", 0.01)
    questions = []

    async def frozen_at_first(_request):
        questions.append(1)
        if len(questions) in (1, 3):
            await asyncio.Event().wait()
        if len(questions) == 2:
            return web.Response(status=202)
        body = encode_body(LayoutReply([described()]))
        return web.Response(body=body, content_type=CONTENT_TYPE)

    assert await client.ask("127.0.0.1", await serve(frozen_at_first), ROOM) == [described()]
    assert len(questions) == 4


async def test_a_server_that_has_it_ask_again_at_once_is_asked_now_and_then(
    serve, client, monkeypatch
):
    """Which server it is, a user may say."""
    monkeypatch.setattr(layout_exchange, "_PAUSE_S", 0.0)
    questions = []

    async def again(_request):
        questions.append(1)
        return web.Response(status=202)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.ask("127.0.0.1", await serve(again), ROOM), 0.4)
    assert len(questions) == 1


@pytest.mark.parametrize("status", [200, 302, 500])
async def test_an_answer_that_is_not_ours_is_no_answer(serve, client, status):
    async def other(_request):
        return web.Response(status=status, body=b"hello", content_type=CONTENT_TYPE)

    with pytest.raises(UnavailableError, match="cannot be read"):
        await client.ask("127.0.0.1", await serve(other), ROOM)


async def test_cancelling_the_question_ends_it_there(serve, client):
    asked, dropped = asyncio.Event(), asyncio.Event()

    async def hangs(_request):
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            dropped.set()
            raise

    question = asyncio.create_task(client.ask("127.0.0.1", await serve(hangs), ROOM))
    await asyncio.wait_for(asked.wait(), 5)
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question
    await asyncio.wait_for(dropped.wait(), 5)
