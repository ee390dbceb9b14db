from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

import sites
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.errors import EpdError
from sglang_epd.wire.http import (
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    ItemOutcome,
    decode_body,
    encode_body,
)

Answer = Callable[[EncodeRequest], Awaitable[web.Response]]


Start = Callable[[], Awaitable["FakeEncoder"]]


class FakeEncoder:
    """An encoder's HTTP surface on loopback, that answers as a test wants."""

    def __init__(self) -> None:
        self.url = ""
        self.answer: Answer = self.deliver
        self.requests: list[EncodeRequest] = []
        self.headers: list[dict[str, str]] = []
        self.peers: list[tuple[str, int]] = []
        self._closes = False
        self.asked = asyncio.Event()
        self.dropped = asyncio.Event()

    @property
    def items(self) -> list[int]:
        """Every item it was ever asked for, in order."""
        return [item.item for request in self.requests for item in request.items]

    async def handle(self, http: web.Request) -> web.Response:
        request = decode_body(await http.read(), EncodeRequest, 1 << 30)
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        assert http.transport is not None
        self.peers.append(http.transport.get_extra_info("peername"))
        self.asked.set()
        if self._closes:
            http.transport.abort()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.dropped.set()
            raise

    # Answers.

    @staticmethod
    def reply(request: EncodeRequest, *outcomes: ItemOutcome) -> web.Response:
        return web.Response(body=encode_body(EncodeReply(request.request_id, "it", list(outcomes))))

    async def deliver(self, request: EncodeRequest) -> web.Response:
        return self.reply(request, *(ItemOutcome(item.item, "delivered") for item in request.items))

    @staticmethod
    def refusal(error: EpdError, retry_after: str = "") -> web.Response:
        body = encode_body(ErrorReply(error.code, error.message))
        headers = {"Retry-After": retry_after} if retry_after else {}
        return web.Response(body=body, status=error.status, headers=headers)

    # Behaviours.

    def refuses(self, error: EpdError) -> None:
        self.answers(lambda: self.refusal(error))

    def closes(self) -> None:
        """Like a process that ends."""
        self._closes = True

    def hangs(self) -> None:
        async def answer(_request: EncodeRequest) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        self.answer = answer

    def says(self, *outcomes: ItemOutcome) -> None:
        async def answer(request: EncodeRequest) -> web.Response:
            return self.reply(request, *outcomes)

        self.answer = answer

    def answers(self, response: Callable[[], web.Response]) -> None:
        async def answer(_request: EncodeRequest) -> web.Response:
            return response()

        self.answer = answer


@contextlib.asynccontextmanager
async def served(
    method: str,
    path: str,
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """A handler on loopback; its server's URL."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route(method, path, handle)
    async with sites.up(app, tls=tls, handler_cancellation=True) as url:
        yield url


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts one more encoder at each call."""
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> FakeEncoder:
            encoder = FakeEncoder()
            place = served("POST", "/v1/encode", encoder.handle)
            encoder.url = await stack.enter_async_context(place)
            return encoder

        yield start


@pytest.fixture
async def client() -> AsyncIterator[EncoderClient]:
    async with EncoderClient("secret") as client:
        yield client


@pytest.fixture
def dead_url(unused_tcp_port: int) -> str:
    """Nobody listens there."""
    return f"http://127.0.0.1:{unused_tcp_port}"


class StatusServer:
    """An encoder that tells how it is, as a test wants.

    Attributes:
        report, raw: what it answers; `raw` counts if it is set.
        asked: how often it was.
    """

    def __init__(self, namespace: str) -> None:
        self.url = ""
        self.status = 200
        self.report = {"namespace": namespace, "state": "ready", "patches_queued": 7}
        self.raw: bytes | None = None
        self.asked = 0
        self.headers: list[dict[str, str]] = []
        self._thawed = asyncio.Event()
        self._thawed.set()

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.headers.append(dict(request.headers))
        await self._thawed.wait()
        body = json.dumps(self.report).encode() if self.raw is None else self.raw
        return web.Response(body=body, status=self.status)


@pytest.fixture
async def status_server() -> AsyncIterator[Callable[..., Awaitable[StatusServer]]]:
    """Starts one more at each call."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(namespace: str = "ours", tls: ssl.SSLContext | None = None) -> StatusServer:
            server = StatusServer(namespace)
            place = served("GET", "/v1/status", server.handle, tls)
            server.url = await stack.enter_async_context(place)
            return server

        yield start
