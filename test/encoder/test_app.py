from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import pytest
import uvicorn

from sglang_epd.cli.checks.servers import servers
from sglang_epd.cli.probes import target
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.encoder import answering
from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.app import create_app
from sglang_epd.errors import (
    DuplicateError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from sglang_epd.spans import begin
from sglang_epd.trust import Trust
from sglang_epd.wire.envelope import MAJOR, seal
from sglang_epd.wire.http import ErrorReply, decode_body, encode_body
from spans import said
from waiting import until

PATIENCE_S = 5.0
MAX_BODY = 1 << 20
Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve(service, metrics) -> AsyncIterator[Serve]:
    """Serves the application on loopback by uvicorn, as the encoder does."""
    servers: list[tuple[uvicorn.Server, socket.socket]] = []

    async def start(token: str = "", **options: Any) -> str:
        info = {"model_path": "model", "namespace": service.namespace}
        app = create_app(Answering(service, metrics, Trust(token), MAX_BODY, **options), info)
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        # Not `serve`, which takes over the signals and ends only at its next tick.
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        listening = socket.create_server(("127.0.0.1", 0))
        servers.append((server, listening))
        await server.startup([listening])
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, listening in servers:
        await server.shutdown([listening])


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def idle(service):
    return partial(until, lambda: not service.status()["requests"])


async def entered(stage) -> None:
    await asyncio.wait_for(stage.entered.wait(), PATIENCE_S)


async def post(http, url, body, **headers) -> tuple[int, bytes, Mapping[str, str]]:
    if isinstance(body, bytes):
        body = io.BytesIO(body)
    async with http.post(f"{url}/v1/encode", data=body, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def ask(http, method: str, url: str, **headers: str) -> tuple[int, str]:
    async with http.request(method, url, headers=headers) as response:
        return response.status, await response.text()


async def look(http, url: str, **headers: str) -> Any:
    async with http.get(url, headers=headers) as response:
        assert response.status == 200
        return await response.json()


@contextlib.asynccontextmanager
async def sending(
    url: str, head: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which the beginning of an encode request was sent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\n" + head)
    try:
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_our_client_and_our_server_understand_each_other(serve, fakes, asking):
    url = await serve("secret")
    async with EncoderClient("secret") as client:
        assert (await client.encode(url, asking(b"x"))).outcomes[0].state == "delivered"
        with pytest.raises(NamespaceError, match="identity differs"):
            await client.encode(url, asking(b"x", namespace="other"))
    async with EncoderClient("wrong") as client:
        with pytest.raises(UnavailableError, match="TOKEN"):
            await client.encode(url, asking(b"x"))


BAD_TOKENS = [None, "", "secret", "Bearer", "Bearer wrong", "Bearer  secret", "Basic secret", "é"]


@pytest.mark.parametrize("header", BAD_TOKENS)
async def test_without_the_token_nothing_is_encoded(serve, http, recorded, fakes, asking, header):
    url = await serve("secret", begin_span=partial(begin, "epd_encode"))
    headers = {} if header is None else {"Authorization": header}
    status, body, _ = await post(http, url, encode_body(asking(b"x")), **headers)
    assert (status, body) == (401, b"")
    assert not fakes.acquire.calls
    assert not recorded.ended, "nor is a trace written"


async def test_a_doctor_finds_the_token_that_one_side_lacks(serve, http, asking):
    async def look(url: str, token: str) -> list[str]:
        found = await asyncio.to_thread(lambda: [*servers([target(url)], token)])
        return [f"{one.verdict}: {one.found}" for one in found if one.subject == "token"]

    url = await serve("secret")
    assert await look(url, "wrong") == [f"fail: {url} does not take this shell's"]
    assert await look(url, "") == [f"fail: {url} wants one, and this shell has none"]
    assert await look(url, "secret") == [f"ok: {url} takes it"], "a look is no refusal"
    # As a language server without it asks.
    assert (await post(http, url, encode_body(asking(b"x"))))[0] == 401
    lacks = f"warn: {url} has refused 1 requests that lacked its token"
    assert await look(url, "secret") == [lacks, f"ok: {url} takes it"]
    # In one process both encoders count refusals together.
    url = await serve()
    assert await look(url, "secret") == [
        f"warn: {url} has none: any host that reaches it may use it",
        f"warn: {url} has refused 1 requests that lacked its token",
    ]
    assert f"ok: {url} takes requests without one" in await look(url, "")


@pytest.mark.parametrize("of", ["cache", "urls"])
async def test_without_the_token_nothing_is_dropped(serve, http, of):
    url = f"{await serve('secret')}/v1/{of}"
    assert await ask(http, "DELETE", url) == (401, "")
    assert (await ask(http, "DELETE", url, Authorization="Bearer secret"))[0] == 200


@pytest.mark.parametrize("path", ["start_profile", "stop_profile"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_the_token_nothing_is_profiled(serve, http, method, path):
    url = f"{await serve('secret')}/{path}"
    assert await ask(http, method, url) == (401, "")
    status, _ = await ask(http, method, url, Authorization="Bearer secret")
    assert status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\xff" * 100,
        seal(b""),
        seal(b"\xff" * 100),
        seal(b"\x91" * 100_000),
        seal(b"\x82\xaarequest_id\xa1\xff"),
        b"EPD" + bytes([MAJOR + 1, 0]),
        encode_body(ErrorReply("x", "y")),
    ],
)
async def test_a_garbage_body_is_a_bad_request(serve, http, fakes, count, body):
    status, answer, _ = await post(http, await serve(), body)
    assert status == 400
    assert decode_body(answer, ErrorReply, MAX_BODY).code == ProtocolError.__name__
    assert count("refusals_total", code="ProtocolError") == 1
    assert not fakes.acquire.calls


async def test_a_body_over_the_limit_is_refused(serve, http, fakes, asking):
    url = await serve()
    status, answer, _ = await post(http, url, encode_body(asking(bytes(MAX_BODY))))
    assert status == 413
    assert decode_body(answer, ErrorReply, MAX_BODY).code == MediaTooLargeError.__name__
    assert not fakes.acquire.calls


async def test_an_endless_body_is_not_read_to_its_end(serve, http, fakes):
    url = await serve()
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    with contextlib.suppress(aiohttp.ClientError):  # the connection may end before the answer
        status, _, _ = await asyncio.wait_for(post(http, url, endless()), PATIENCE_S)
        assert status == 413
    assert sent < MAX_BODY + (64 << 20)


@pytest.mark.parametrize(
    ("error", "status"), [(DuplicateError("live"), 409), (OverloadedError("full"), 503)]
)
async def test_a_refusal_has_its_status_and_class(
    serve, http, service, asking, count, monkeypatch, error, status
):
    async def refuse(_request, _room, _span):
        raise error

    monkeypatch.setattr(service, "encode", refuse)
    got, body, _ = await post(http, await serve(), encode_body(asking(b"x")))
    assert got == status
    assert decode_body(body, ErrorReply, MAX_BODY) == ErrorReply(error.code, error.message)
    assert count("refusals_total", code=error.code) == 1


@pytest.mark.parametrize("stage", ["acquire", "preprocess", "offered", "forwarded", "delivered"])
async def test_a_client_that_goes_away_cancels_the_work(serve, fakes, asking, count, idle, stage):
    url = await serve()
    held = getattr(fakes, stage)
    held.hold()
    async with EncoderClient() as client:
        call = asyncio.create_task(client.encode(url, asking(b"x")))
        await entered(held)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await idle()
    assert count("items_total", modality="IMAGE", outcome="cancelled") == 1
    assert not fakes.payloads


async def test_a_client_that_goes_away_amid_its_body_leaves_no_trace(serve, http, caplog):
    url = await serve()
    async with sending(url, b"Content-Length: 1000\r\n\r\nEPD"):
        pass
    assert (await ask(http, "GET", f"{url}/health"))[0] == 200
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


async def test_health_info_status_and_metrics_need_no_token(serve, http, asking):
    url = await serve("secret")
    token = {"Authorization": "Bearer secret"}
    await post(http, url, encode_body(asking(b"x")), **token)
    for path in ("/health", "/health_generate"):
        assert await ask(http, "GET", url + path) == (200, "")
    for path in ("/v1/info", "/model_info", "/get_model_info"):
        assert (await look(http, url + path))["model_path"] == "model"
    _, status = await ask(http, "GET", f"{url}/v1/status")
    assert '"finished":1' in status
    assert "r1" not in status, "whose requests there were is not for everybody"
    assert '"authorised":false' in status
    assert await ask(http, "GET", f"{url}/v1/recent") == (401, "")
    _, status = await ask(http, "GET", f"{url}/v1/status", **token)
    assert '"authorised":true' in status
    _, recent = await ask(http, "GET", f"{url}/v1/recent", **token)
    assert '"state":"delivered"' in recent and "r1" in recent
    assert "secret" not in status + recent, "neither the token nor a ticket"
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain")
    assert 'sglang:epd_encoder_items_total{modality="IMAGE",outcome="delivered"} 1.0' in text


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
async def test_without_a_tower_that_works_it_is_not_healthy(serve, http, fakes, path):
    url = await serve()
    for alive, expected in ((True, 200), (False, 503)):
        fakes.alive = alive
        assert (await ask(http, "GET", url + path))[0] == expected
        (tower,) = (await look(http, f"{url}/v1/status"))["towers"]
        assert tower["alive"] == alive


async def test_no_pages_of_documentation_are_served(serve, http):
    url = await serve()
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert (await ask(http, "GET", url + path))[0] == 404


@pytest.mark.parametrize(("silence_s", "body_s"), [(0.05, 60.0), (60.0, 0.05)])
async def test_a_body_that_does_not_come_gives_its_bytes_back(
    serve, service, monkeypatch, silence_s, body_s
):
    """Its asker was stopped, or sends next to nothing: the connection tells neither."""
    monkeypatch.setattr(answering, "_SILENCE_S", silence_s)
    monkeypatch.setattr(answering, "_BODY_S", body_s)
    async with sending(await serve(), b"Content-Length: 100000\r\n\r\nEPD") as (reader, writer):
        answer = asyncio.create_task(reader.readline())
        async with asyncio.timeout(PATIENCE_S):
            while not answer.done():
                if silence_s > body_s:
                    writer.write(b"x")
                await asyncio.sleep(0.005)
        assert b" 503 " in answer.result()
        assert service.admission.nbytes == 0


@pytest.fixture
async def busy(serve, http, service, fakes, asking):
    """An encoder with one live request, until it is told to go on: its URL and the call."""
    url = await serve()
    fakes.forwarded.hold()
    call = asyncio.create_task(post(http, url, encode_body(asking(b"x", request_id="live"))))
    await entered(fakes.forwarded)
    yield url, call
    fakes.forwarded.go_on()
    assert (await call)[0] == 200
    assert service.admission.nbytes == 0


@pytest.mark.parametrize(("bound", "most"), [("max_bytes", 1000), ("max_items", 1)])
async def test_what_does_not_fit_is_refused_before_its_body_is_read(busy, service, bound, most):
    url, _ = busy
    setattr(service.admission, bound, most)
    async with sending(url, b"Content-Length: 1000\r\n\r\n") as (reader, _):
        assert b" 503 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)


async def test_a_body_of_unknown_length_is_refused_where_it_passes_the_bound(busy, service, http):
    url, _ = busy
    service.admission.max_bytes = 10_000
    sent = 0

    async def chunks():
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    with contextlib.suppress(aiohttp.ClientError):  # the connection may end before the answer
        status, body, headers = await asyncio.wait_for(post(http, url, chunks()), PATIENCE_S)
        assert status == 503
        assert decode_body(body, ErrorReply, MAX_BODY).code == OverloadedError.__name__
        assert int(headers["Retry-After"]) >= 1
    assert sent < 64 << 20
    assert service.admission.nbytes < 1000, "what was read of it is no more"


async def test_an_only_body_of_unknown_length_may_be_over_the_byte_bound(
    serve, http, service, asking
):
    url = await serve()
    service.admission.max_bytes = 100
    body = encode_body(asking(bytes(5000)))

    async def chunks():
        for at in range(0, len(body), 500):
            yield body[at : at + 500]
            await asyncio.sleep(0.001)

    assert (await post(http, url, chunks()))[0] == 200
    assert service.admission.nbytes == 0


async def test_while_it_drains_it_finishes_what_it_has_and_takes_nothing_new(
    busy, service, http, asking
):
    url, call = busy
    service.drain()
    for path in ("/health", "/health_generate"):
        assert (await ask(http, "GET", url + path))[0] == 503
    status, body, headers = await post(http, url, encode_body(asking(b"y")))
    assert status == 503
    assert decode_body(body, ErrorReply, MAX_BODY).code == UnavailableError.__name__
    assert int(headers["Retry-After"]) >= 1
    status = await look(http, f"{url}/v1/status")
    assert (status["state"], status["requests"]) == ("draining", 1)
    assert not call.done()


async def test_the_status_shows_queue_towers_and_cache_to_everybody(busy, http):
    url, _ = busy
    status = await look(http, f"{url}/v1/status")
    assert status["state"] == "ready"
    assert (status["requests"], status["items"], status["finished"]) == (1, 1, 0)
    assert 0 < status["bytes"] < status["max_bytes"]
    assert status["queue"]["running"] == 1
    assert status["towers"] == [{"alive": True, "patches": 12}]
    assert set(status["cache"]) == {"entries", "bytes", "pinned_bytes", "capacity_bytes"}


@pytest.mark.parametrize("capacity", [1 << 20])
async def test_what_is_kept_can_be_dropped(serve, http, asking, cache, service, reader, site):
    service.urls = reader
    encoder = await serve()
    await post(http, encoder, encode_body(asking(b"1", b"2", f"{site.url}/a")))
    assert (cache.nbytes, len(reader.memory)) == (3 * 48, 1)
    assert await ask(http, "DELETE", f"{encoder}/v1/cache") == (200, '{"dropped":3}')
    assert await ask(http, "DELETE", f"{encoder}/v1/urls") == (200, '{"dropped":1}')
    assert (cache.nbytes, len(reader.memory)) == (0, 0)


async def test_a_trace_context_of_any_kind_is_no_error(serve, http, recorded, asking):
    url = await serve(begin_span=partial(begin, "epd_encode"))
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for told in (parent, "garbage", "00-" + "a" * 6000, "\xff"):
        status, _, _ = await post(http, url, encode_body(asking(b"x")), traceparent=told)
        assert status == 200
    status, _, _ = await post(http, url, b"not ours", traceparent=parent)
    assert status == 400
    first, *others, refused = recorded.named("epd_encode")
    assert f"{first.parent.span_id:x}" == "f067aa0ba902b7"
    assert all(span.parent is None for span in others)
    assert said(refused)["error.type"] == "ProtocolError"
