"""The encoder's gRPC server, and the client of this package's language servers, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from sglang_epd.cli.checks import Finding, Verdict
from sglang_epd.cli.checks.servers import servers
from sglang_epd.cli.probes import ServerView, ask, target
from sglang_epd.dispatch import rpc as rpc_module
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.pool import Health, Pool
from sglang_epd.dispatch.prober import Prober
from sglang_epd.dispatch.rpc import Rpc
from sglang_epd.encoder import answering as answering_module
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.rpc import RpcServer
from sglang_epd.errors import (
    ConfigError,
    DeadlineError,
    EncoderLostError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
)
from sglang_epd.spans import begin
from sglang_epd.trust import Trust
from sglang_epd.wire import rpc
from sglang_epd.wire.http import ErrorReply, body_pieces, decode_body, open_session
from transfer.links import Link
from waiting import until

MAX_BODY = 1 << 20
TOKEN = {"Authorization": "Bearer secret"}
Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve(service, metrics) -> AsyncIterator[Serve]:
    """Starts the encoder's server; its URL."""
    async with AsyncExitStack() as stack:

        async def start(token: str = "", **options) -> str:
            answering = Answering(service, metrics, Trust(token), MAX_BODY, **options)
            server = RpcServer(answering, "127.0.0.1:0")
            await server.start()
            start.stop = server.stop
            stack.push_async_callback(server.stop, 0)
            return f"grpc://127.0.0.1:{server.port}"

        yield start


@pytest.fixture
async def client() -> AsyncIterator[EncoderClient]:
    async with EncoderClient("secret") as client:
        yield client


async def test_items_are_encoded_and_large_media_arrive_as_they_were(
    serve, client, service, fakes, asking
):
    url = await serve("secret")
    media = os.urandom(400_000), b"small", os.urandom(300_000)
    for number in range(2):
        reply = await client.encode(url, asking(*media, request_id=f"r{number}"))
        assert [outcome.state for outcome in reply.outcomes] == ["delivered"] * 3
    assert fakes.acquire.calls == [*media, *media]
    assert not service.status()["bytes"]


async def test_without_the_token_nothing_is_read(serve, service, fakes, asking, count):
    url = await serve("secret")
    async with EncoderClient() as stranger, EncoderClient("wrong") as other:
        for one in (stranger, other):
            with pytest.raises(UnavailableError, match="refused this server's SGLANG_EPD_TOKEN"):
                await one.encode(url, asking(b"a"))
    async with EncoderClient("secret") as known:
        await known.encode(url, asking(b"a"))
    assert len(fakes.acquire.calls) == 1
    assert count("requests_total", status="401") == 2
    assert count("requests_total", status="200") == 1


async def test_a_strangers_body_is_not_read_to_its_end(serve, count):
    url = await serve("secret")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        # The answer, or the break of a write that it met.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.wait_for(channel.stream_unary(rpc.ENCODE)(endless()), 5)
    assert count("requests_total", status="401") == 1


@pytest.mark.parametrize(
    "method", [rpc.STATUS, "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
)
async def test_what_asks_for_no_token_reads_no_message(serve, method):
    """More than gRPC takes: it would say so."""
    url = await serve("secret")
    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        call = channel.unary_stream(method)(bytes(2 * MAX_BODY))
        assert len([answer async for answer in call]) == 1


@pytest.mark.parametrize(
    ("changes", "error", "said_of_it"),
    [
        ({"namespace": "other"}, NamespaceError, "encoder identity differs"),
        ({"full": True}, OverloadedError, "8 items in work, at most 8"),
        ({"draining": True}, UnavailableError, "shutting down"),
        ({"large": True}, MediaTooLargeError, f"over {MAX_BODY} bytes"),
    ],
)
async def test_a_refusal_keeps_its_class_and_text(
    serve, client, service, asking, changes, error, said_of_it
):
    url = await serve("secret")
    service.admission.items = 8 if changes.pop("full", False) else 0
    if changes.pop("draining", False):
        service.drain()
    media = os.urandom(MAX_BODY) if changes.pop("large", False) else b"a"
    with pytest.raises(error, match=f"encoder {url}: .*{said_of_it}") as raised:
        await client.encode(url, asking(media, **changes))
    assert type(raised.value) is error
    assert (raised.value.retry_after_s is None) == (
        error not in (OverloadedError, UnavailableError)
    )


async def test_refusals_of_large_requests_keep_their_class_however_much_is_on_its_way(
    serve, client, service, asking
):
    """gRPC's client may find that it cannot write on before it finds why: of these calls some
    thirty in a thousand would."""
    url = await serve("secret")
    media = os.urandom(MAX_BODY)
    for _ in range(50):
        calls = (client.encode(url, asking(media, request_id=f"r{n}")) for n in range(6))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(one) for one in outcomes} == {MediaTooLargeError}
    assert not service.status()["bytes"]


async def test_a_call_that_is_answered_late_outlives_the_port(serve, client, fakes, asking):
    """An encoder that ends answers what it has on the connections that stand: a call that finds
    no connection any more takes none of them along."""
    url = await serve("secret")
    fakes.forwarded.hold()
    call = asyncio.create_task(client.encode(url, asking(b"a")))
    await asyncio.wait_for(fakes.forwarded.entered.wait(), 5)
    ending = asyncio.create_task(serve.stop(10.0))

    async def refused() -> bool:
        with pytest.raises(UnavailableError) as error:
            await client.encode(url, asking(b"a", request_id="late"))
        return "out of reach" in error.value.message

    async with asyncio.timeout(5):
        while not await refused():
            await asyncio.sleep(0.01)
    assert not call.done()
    fakes.forwarded.go_on()
    reply = await asyncio.wait_for(call, 5)
    assert [outcome.state for outcome in reply.outcomes] == ["delivered"]
    await ending


async def test_a_length_of_any_number_of_digits_is_too_large(serve):
    url = await serve()
    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        call = channel.stream_unary(rpc.ENCODE)(iter([b"EPD"]), metadata=[(rpc.LENGTH, "9" * 5000)])
        await call
        assert dict(await call.trailing_metadata())[rpc.CODE] == "413"


async def test_a_call_that_is_cancelled_ends_the_work(serve, client, service, fakes, asking, count):
    url = await serve("secret")
    fakes.forwarded.hold()
    call = asyncio.create_task(client.encode(url, asking(b"a")))
    await asyncio.wait_for(fakes.forwarded.entered.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not service.status()["requests"])
    await until(lambda: count("requests_total", status="499") == 1)
    assert count("items_total", modality="IMAGE", outcome="cancelled") == 1


async def test_a_deadline_ends_the_call_and_the_work(serve, client, service, fakes, asking):
    url = await serve("secret")
    fakes.forwarded.hold()
    # The encoder's own is later.
    body = body_pieces(asking(b"a", ttl_s=30.0))
    with pytest.raises(DeadlineError, match=f"encoder {url} did not answer"):
        await client._transport(url).post(url, body, TOKEN, 0.5)
    assert fakes.forwarded.calls
    await until(lambda: not service.status()["requests"])


async def test_an_encoder_that_ends_has_lost_the_request(serve, client, fakes, asking):
    url = await serve("secret")
    fakes.forwarded.hold()
    call = asyncio.create_task(client.encode(url, asking(b"a")))
    await asyncio.wait_for(fakes.forwarded.entered.wait(), 5)
    await serve.stop(0)
    with pytest.raises(EncoderLostError, match=f"encoder {url} went away"):
        await call
    # And nobody is there now, which is said at once, and again.
    for _ in range(2):
        async with asyncio.timeout(4):
            with pytest.raises(UnavailableError, match=f"encoder {url}"):
                await client.encode(url, asking(b"a"))


async def test_a_body_that_does_not_end_is_given_up(serve, service, monkeypatch):
    monkeypatch.setattr(answering_module, "_SILENCE_S", 0.1)
    url = await serve()

    async def half():
        yield b"EPD"
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        call = channel.stream_unary(rpc.ENCODE)(half())
        answer = await call
        assert dict(await call.trailing_metadata())[rpc.CODE] == "503"
    assert b"did not come" in answer
    assert not service.status()["bytes"]


async def test_a_body_that_says_it_is_too_large_is_not_awaited(serve):
    url = await serve()

    async def half():
        yield b"EPD"
        await asyncio.Event().wait()

    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        said = [(rpc.LENGTH, str(MAX_BODY + 1))]
        call = channel.stream_unary(rpc.ENCODE)(half(), metadata=said)
        async with asyncio.timeout(10):
            await call
        assert dict(await call.trailing_metadata())[rpc.CODE] == "413"


async def test_an_encoder_that_is_gone_is_tried_no_further(client, asking, unused_tcp_port):
    """Two ask at a time: both hear of it."""
    url = f"grpc://127.0.0.1:{unused_tcp_port}"
    asked = (client.encode(url, asking(b"a")) for _ in range(2))
    heard = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in heard] == [UnavailableError] * 2
    assert all("is out of reach" in str(error) for error in heard)
    tried = asyncio.Event()
    server = await asyncio.start_server(
        lambda _reader, _writer: tried.set(), "127.0.0.1", unused_tcp_port
    )
    async with server:
        with pytest.raises(TimeoutError):
            # gRPC tries again after 1 s, if it does.
            await asyncio.wait_for(tried.wait(), 2.5)


async def test_an_encoder_that_says_nothing_is_tried_no_longer_than_its_caller_waits():
    """As by the prober, whose patience is less than that of a connection. gRPC would try again
    after 20 s, and for ever."""
    asker = Rpc()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"grpc://127.0.0.1:{deaf.getsockname()[1]}"
        # Of two that wait the one that leaves takes nothing from the other.
        for limits_s in ((0.1, 0.3), (0.3, 0.1)):
            asked = [asyncio.wait_for(asker.status(url), limit_s) for limit_s in limits_s]
            heard = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(error) for error in heard] == [TimeoutError] * 2
            assert not asker._links
    await asker.close()


async def test_a_connection_that_nothing_comes_through_is_left(serve):
    """A host that went without a word: the channel says for minutes that it stands."""
    link = Link((await serve("secret")).replace("grpc://", "tcp://"))
    asker, url = Rpc(), link.endpoint.replace("tcp://", "grpc://")
    assert await asker.status(url, TOKEN)
    link.strand()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asker.status(url, TOKEN), 0.5)
    assert await asyncio.wait_for(asker.status(url, TOKEN), 10)
    await asker.close()
    link.close()


async def test_nothing_is_kept_of_encoders_that_have_left(serve):
    asker, left = Rpc(), await serve("secret")
    assert await asker.status(left, TOKEN)
    await serve.stop(0)
    await until(lambda: not rpc_module._is_connected(asker._links[left].channel))
    staying = await serve("secret")
    assert await asker.status(staying, TOKEN)
    assert list(asker._links) == [staying]
    await asker.close()


async def test_what_is_no_request_is_refused(serve, client):
    url = await serve("secret")
    answer = await client._transport(url).post(url, [b"GET / HTTP/1.1"], TOKEN, 5.0)
    assert answer.status == 400
    assert decode_body(answer.body, ErrorReply, MAX_BODY).code == "ProtocolError"


async def test_a_server_that_is_no_encoder_of_ours_is_named(client, asking):
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(UnavailableError, match=r"UNIMPLEMENTED: is it a sglang-epd encoder\?"):
            await client.encode(f"grpc://127.0.0.1:{port}", asking(b"a"))
    finally:
        await server.stop(0)


async def test_the_trace_of_the_asker_goes_on(serve, client, asking, recorded):
    url = await serve("secret", begin_span=partial(begin, "epd_encode"))
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    await client.encode(url, asking(b"a"), headers)
    assert {f"{one.context.trace_id:032x}" for one in recorded.ended} == {trace}


async def test_the_prober_hears_of_it(serve, service):
    url = await serve("secret")
    pool = Pool(service.namespace)
    async with open_session() as session:
        prober = Prober(pool, session, Trust().client_ssl())
        pool.listen(prober.doubt)
        pool.add(url, "static")
        await until(lambda: pool.state(url) is Health.READY)
        service.drain()
        await until(lambda: pool.state(url) is Health.DRAINING)
        await serve.stop(0)
        await until(lambda: pool.state(url) is Health.OPEN)
        assert "gRPC" not in str(pool.describe())
        await prober.close()


async def test_health_is_asked_for_as_of_any_grpc_server(serve, service):
    url = await serve("secret")
    async with grpc.aio.insecure_channel(url.removeprefix(rpc.SCHEME)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="sglang.grpc.encoder.SglangEncoder")
        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        service.drain()
        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watched = [one.status async for one in health.Watch(asked)]
        assert watched == [health_pb2.HealthCheckResponse.NOT_SERVING]


async def status(url: str) -> ServerView:
    """As `sglang-epd status` finds it."""
    (view,) = await asyncio.to_thread(ask, [target(url)])
    return view


async def doctor(url: str, token: str) -> dict[str, Finding]:
    """As `sglang-epd doctor` finds it, by subject."""
    return {
        one.subject: one for one in await asyncio.to_thread(list, servers([target(url)], token))
    }


async def test_status_asks_by_grpc(serve, service, client, asking, fakes, unused_tcp_port):
    url = await serve("secret")
    fakes.forwarded.hold()
    call = asyncio.create_task(client.encode(url, asking(b"a")))
    await asyncio.wait_for(fakes.forwarded.entered.wait(), 10)
    view = await status(url)
    assert (view.role, view.state, view.problem) == ("encoder", "ready", "")
    assert (view.running, view.queued, view.namespace) == (1, 0, service.namespace)
    assert (view.items, view.hit_rate) == (None, None)
    assert "SGLANG_EPD_ENCODER_HTTP_PORT" in view.hint
    fakes.forwarded.go_on()
    await call
    service.drain()
    assert (await status(url)).state == "draining"
    nobody = await status(f"grpc://127.0.0.1:{unused_tcp_port}")
    assert (nobody.state, "out of reach" in nobody.problem) == ("unreachable", True)


async def test_an_encoder_without_a_working_tower_does_not_serve(serve, fakes):
    url = await serve()
    fakes.alive = False
    view = await status(url)
    assert (view.state, view.problem) == ("silent", "grpc.health.v1 answers NOT_SERVING")


async def test_doctor_shows_the_token_by_grpc(serve, service, count):
    url = await serve("secret")
    right, wrong = await doctor(url, "secret"), await doctor(url, "wrong")
    assert right[url].found == "encoder, ready"
    assert (right["token"].verdict, wrong["token"].verdict) == (Verdict.OK, Verdict.FAIL)
    assert service.namespace in right["namespace"].found
    assert not count("requests_total", status="401"), "its look is no encode request"


async def test_an_encoder_of_sglangs_tells_its_health_alone():
    server = grpc.aio.server()
    told = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        view = await status(f"grpc://127.0.0.1:{port}")
        assert (view.role, view.state, view.problem) == ("server", "ready", "")
        assert "is it a sglang-epd encoder?" in view.hint
        assert [*await doctor(f"grpc://127.0.0.1:{port}", "secret")] == [f"grpc://127.0.0.1:{port}"]
        await told.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await status(f"grpc://127.0.0.1:{port}")).state == "silent"
    finally:
        await server.stop(0)


async def test_a_port_that_is_taken_is_an_error(serve, service, metrics):
    url = await serve()
    answering = Answering(service, metrics, Trust(), MAX_BODY)
    with pytest.raises(ConfigError, match=r"--port: cannot listen at 127\.0\.0\.1"):
        RpcServer(answering, url.removeprefix(rpc.SCHEME))
