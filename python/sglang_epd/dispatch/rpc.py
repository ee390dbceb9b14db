"""Encoders over gRPC (`grpc://host:port`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sglang_epd.dispatch.transport import (
    CONNECT_TIMEOUT_S,
    MAX_REPLY_BYTES,
    Answer,
    out_of_reach,
    written,
)
from sglang_epd.errors import DeadlineError, EncoderLostError, UnavailableError
from sglang_epd.wire import rpc

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    # As for HTTP: the environment's proxies are not for servers of one group.
    ("grpc.enable_http_proxy", 0),
    # Two loops of a process have connections of their own.
    ("grpc.use_local_subchannel_pool", 1),
)
# The encoder had the request, or may have had it.
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


@dataclass(eq=False)
class _Link:
    """An encoder's channel.

    Attributes:
        calls: that have it, or wait for its connection.
        over: whether it is closed behind the last of them.
    """

    channel: grpc.aio.Channel
    calls: int = 0
    over: bool = False


class Rpc:
    """A `Transport`. Keeps a connection an encoder; use it from one event loop.

    A channel that gets no connection is closed, also where its caller has not waited for that:
    gRPC would try for ever, at the address of an encoder that is gone for good. Closing would
    cancel its calls, which an encoder that is ending may yet answer on the connection from before:
    they are awaited.
    """

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    async def post(
        self, url: str, body: Sequence[bytes], headers: Mapping[str, str], ttl_s: float
    ) -> Answer:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in written(body):
                yield bytes(piece)

        length = rpc.LENGTH, str(sum(map(len, body)))
        metadata = [length, *_sent(headers)]
        try:
            async with asyncio.timeout(ttl_s), self._connected(url) as channel:
                call = channel.stream_unary(rpc.ENCODE)(pieces(), metadata=metadata)
                answer = await call
                told = dict(await call.trailing_metadata())
        except TimeoutError:
            raise DeadlineError(f"encoder {url} did not answer before the deadline") from None
        except grpc.aio.AioRpcError as error:
            raise _failure(url, error.code()) from None
        code = str(told.get(rpc.CODE, ""))
        if not code.isdecimal():
            raise _stranger(url, "without a status")
        return Answer(int(code), answer, str(told.get(rpc.AGAIN, "")))

    async def status(self, url: str, headers: Mapping[str, str] = {}) -> bytes:
        """An encoder's answer to `Status`, JSON.

        Raises:
            UnavailableError: there is none.
        """
        try:
            async with self._connected(url) as channel:
                answer: bytes = await channel.unary_unary(rpc.STATUS)(b"", metadata=_sent(headers))
        except grpc.aio.AioRpcError as error:
            raise _failure(url, error.code()) from None
        return answer

    async def healthy(self, url: str) -> bool:
        """Whether an encoder, of SGLang's own too, says of itself that it serves.

        Raises:
            UnavailableError: it says nothing.
        """
        try:
            async with self._connected(url) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            raise _failure(url, error.code()) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            link.over = True
        await asyncio.gather(*(link.channel.close() for link in links.values()))

    @asynccontextmanager
    async def _connected(self, url: str) -> AsyncIterator[grpc.aio.Channel]:
        """Around a call: the encoder's channel, once it has a connection.

        Raises:
            UnavailableError: it gets none.
        """
        made = url not in self._links
        if made:
            target = url.removeprefix(rpc.SCHEME)
            channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
            self._links[url] = _Link(channel)
        link = self._links[url]
        link.calls += 1
        try:
            if made:
                await self._close_unconnected()
            await self._connect(url, link)
            yield link.channel
        except asyncio.CancelledError:
            # It got no answer in time: the channel may say for minutes yet that its connection
            # stands, though nothing comes through.
            self._leave(url, link)
            raise
        finally:
            link.calls -= 1
            if not link.calls and (link.over or not _is_connected(link.channel)):
                self._leave(url, link)
                await link.channel.close()

    async def _close_unconnected(self) -> None:
        """Close the channels that have neither calls nor a connection: their encoders have left."""
        for url, link in list(self._links.items()):
            if not link.calls and not _is_connected(link.channel):
                self._leave(url, link)
                await link.channel.close()

    async def _connect(self, url: str, link: _Link) -> None:
        """Wait for a connection; raises as `_connected`."""
        channel = link.channel
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise out_of_reach(url, "no connection")
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except grpc.aio.UsageError:
            # The client was closed.
            raise out_of_reach(url, "no connection") from None
        except UnavailableError:
            self._leave(url, link)
            raise
        except TimeoutError:
            self._leave(url, link)
            raise UnavailableError(f"encoder {url} did not accept a connection") from None

    def _leave(self, url: str, link: _Link) -> None:
        """The next call has another channel."""
        link.over = True
        if self._links.get(url) is link:
            del self._links[url]


def _sent(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers.items()]


def _is_connected(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY


def _failure(url: str, code: grpc.StatusCode) -> UnavailableError:
    if code in _LOST:
        return EncoderLostError(f"encoder {url} went away while it had the request ({code.name})")
    return _stranger(url, code.name)


def _stranger(url: str, what: str) -> UnavailableError:
    return UnavailableError(f"{url} answered gRPC {what}: is it a sglang-epd encoder?")
