from __future__ import annotations

import asyncio
import contextlib
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import aiohttp
import pytest
import uvicorn

from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.encoder.app import create_app
from sglang_epd.errors import (
    DuplicateError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from sglang_epd.wire import MAJOR, EncodeReply, seal
from sglang_epd.wire.http import CONTENT_TYPE, ErrorReply, decode_body, encode_body

PATIENCE_S = 5.0
MAX_BODY = 1 << 20
Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def serve(service, metrics) -> AsyncIterator[Serve]:
    """Serves the application on loopback by uvicorn, as the encoder does."""
    servers: list[tuple[uvicorn.Server, socket.socket]] = []

    async def start(token: str = "") -> str:
        info = {"model_path": "model", "namespace": service.namespace}
        app = create_app(service, metrics, info, token=token, max_body_bytes=MAX_BODY)
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
    async def wait() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while service.status()["requests"]:
                await asyncio.sleep(0.001)

    return wait


async def entered(stage) -> None:
    await asyncio.wait_for(stage.entered.wait(), PATIENCE_S)


async def post(http, url, body, **headers) -> tuple[int, bytes, Mapping[str, str]]:
    if isinstance(body, bytes):
        body = io.BytesIO(body)
    async with http.post(f"{url}/v1/encode", data=body, headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_a_request_is_encoded_and_answered(serve, http, fakes, asking):
    status, body, headers = await post(http, await serve(), encode_body(asking(b"x", b"y")))
    assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
    reply = decode_body(body, EncodeReply, MAX_BODY)
    assert [outcome.state for outcome in reply.outcomes] == ["delivered", "delivered"]
    assert len(fakes.payloads) == 2


async def test_our_client_and_our_server_understand_each_other(serve, fakes, asking):
    url = await serve("secret")
    async with EncoderClient("secret") as client:
        assert (await client.encode(url, asking(b"x"))).outcomes[0].state == "delivered"
        with pytest.raises(NamespaceError, match="identity differs"):
            await client.encode(url, asking(b"x", namespace="other"))
    async with EncoderClient("wrong") as client:
        with pytest.raises(UnavailableError, match="TOKEN"):
            await client.encode(url, asking(b"x"))


@pytest.mark.parametrize(
    "header", [None, "", "secret", "Bearer", "Bearer wrong", "Bearer  secret", "Basic secret", "é"]
)
async def test_without_the_token_nothing_is_encoded_or_cancelled(
    serve, http, fakes, asking, header
):
    url = await serve("secret")
    headers = {} if header is None else {"Authorization": header}
    status, body, _ = await post(http, url, encode_body(asking(b"x")), **headers)
    assert (status, body) == (401, b"")
    async with http.delete(f"{url}/v1/encode/r1", headers=headers) as response:
        assert response.status == 401
    assert not fakes.acquire.calls


async def test_with_the_token_it_is(serve, http, asking):
    url = await serve("secret")
    headers = {"Authorization": "Bearer secret"}
    status, _, _ = await post(http, url, encode_body(asking(b"x")), **headers)
    assert status == 200
    async with http.delete(f"{url}/v1/encode/r1", headers=headers) as response:
        assert response.status == 404


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


async def test_our_client_learns_that_its_body_is_too_large(serve, asking):
    url = await serve()
    async with EncoderClient() as client:
        with pytest.raises(MediaTooLargeError):
            await client.encode(url, asking(bytes(32 << 20)))


@pytest.mark.parametrize(
    ("error", "status"), [(DuplicateError("live"), 409), (OverloadedError("full"), 503)]
)
async def test_a_refusal_has_its_status_and_class(
    serve, http, service, asking, count, monkeypatch, error, status
):
    async def refuse(_request, _room):
        raise error

    monkeypatch.setattr(service, "encode", refuse)
    got, body, _ = await post(http, await serve(), encode_body(asking(b"x")))
    assert got == status
    assert decode_body(body, ErrorReply, MAX_BODY) == ErrorReply(error.code, error.message)
    assert count("refusals_total", code=error.code) == 1


async def test_an_overloaded_encoder_says_when_to_come_again(
    serve, http, service, asking, monkeypatch
):
    async def refuse(_request, _room):
        raise OverloadedError("full", retry_after_s=2.0)

    monkeypatch.setattr(service, "encode", refuse)
    status, _, headers = await post(http, await serve(), encode_body(asking(b"x")))
    assert status == 503
    assert int(headers["Retry-After"]) >= 1


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


async def test_a_client_that_goes_away_amid_its_body_leaves_no_trace(serve, fakes, caplog):
    url = await serve()
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nEPD")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as response:
        assert response.status == 200
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


async def test_delete_cancels_a_live_request(serve, http, fakes, asking, count, idle):
    url = await serve()
    fakes.forwarded.hold()
    call = asyncio.create_task(post(http, url, encode_body(asking(b"x"))))
    await entered(fakes.forwarded)
    async with http.delete(f"{url}/v1/encode/r1") as response:
        assert response.status == 204
    status, _, _ = await call
    assert status == 499
    await idle()
    assert count("items_total", modality="IMAGE", outcome="cancelled") == 1
    async with http.delete(f"{url}/v1/encode/r1") as response:
        assert response.status == 404


async def test_health_info_status_and_metrics_need_no_token(serve, http, fakes, asking):
    url = await serve("secret")
    headers = {"Authorization": "Bearer secret"}
    await post(http, url, encode_body(asking(b"x")), **headers)
    for path in ("/health", "/health_generate"):
        async with http.get(url + path) as response:
            assert response.status == 200
    for path in ("/v1/info", "/model_info", "/get_model_info"):
        async with http.get(url + path) as response:
            assert (await response.json())["model_path"] == "model"
    async with http.get(f"{url}/v1/status") as response:
        status = await response.text()
    assert '"finished":1' in status
    assert "r1" not in status, "whose requests there were is not for everybody"
    async with http.get(f"{url}/v1/status", headers=headers) as response:
        status = await response.text()
    assert '"state":"delivered"' in status and "r1" in status
    assert "secret" not in status, "neither the token nor a ticket"
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain")
    assert 'sglang:epd_encoder_items_total{modality="IMAGE",outcome="delivered"} 1.0' in text


async def test_the_health_probe_never_waits_for_the_work(serve, http, fakes, asking, idle):
    url = await serve()
    fakes.forwarded.hold()
    call = asyncio.create_task(post(http, url, encode_body(asking(b"x"))))
    await entered(fakes.forwarded)
    async with http.get(f"{url}/health", timeout=aiohttp.ClientTimeout(2)) as response:
        assert response.status == 200
    fakes.forwarded.go_on()
    assert (await call)[0] == 200


async def test_no_pages_of_documentation_are_served(serve, http):
    url = await serve()
    for path in ("/docs", "/redoc", "/openapi.json"):
        async with http.get(url + path) as response:
            assert response.status == 404
