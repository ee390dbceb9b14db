"""Encoders over gRPC (`grpc://host:port`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

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


class Rpc:
    """A `Transport`. Keeps a connection an encoder; use it from one event loop.

    A channel that gets no connection is closed: gRPC would try for ever, also at the address of
    an encoder that is gone for good.
    """

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def post(
        self, url: str, body: Sequence[bytes], headers: Mapping[str, str], ttl_s: float
    ) -> Answer:
        async def pieces() -> AsyncIterator[bytes]:
            for piece in written(body):
                yield bytes(piece)

        length = rpc.LENGTH, str(sum(map(len, body)))
        metadata = [length, *((name.lower(), value) for name, value in headers.items())]
        try:
            async with asyncio.timeout(ttl_s):
                channel = await self._connected(url)
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

    async def status(self, url: str) -> bytes:
        """An encoder's answer to `Status`, JSON.

        Raises:
            UnavailableError: there is none.
        """
        try:
            channel = await self._connected(url)
            answer: bytes = await channel.unary_unary(rpc.STATUS)(b"")
        except grpc.aio.AioRpcError as error:
            raise _failure(url, error.code()) from None
        return answer

    async def healthy(self, url: str) -> bool:
        """Whether an encoder, of SGLang's own too, says of itself that it serves.

        Raises:
            UnavailableError: it says nothing.
        """
        try:
            stub = health_pb2_grpc.HealthStub(await self._connected(url))
            answer = await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            raise _failure(url, error.code()) from None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    async def _connected(self, url: str) -> grpc.aio.Channel:
        """The encoder's channel, once it has a connection.

        Raises:
            UnavailableError: it gets none.
        """
        if url not in self._channels:
            target = url.removeprefix(rpc.SCHEME)
            self._channels[url] = grpc.aio.insecure_channel(target, options=_OPTIONS)
        channel = self._channels[url]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise out_of_reach(url, "no connection")
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except grpc.aio.UsageError:
            # Another call has found the same, and closed the channel.
            raise out_of_reach(url, "no connection") from None
        except (TimeoutError, UnavailableError) as error:
            if channel is self._channels.get(url):
                await self._channels.pop(url).close()
            if isinstance(error, UnavailableError):
                raise
            raise UnavailableError(f"encoder {url} did not accept a connection") from None
        return channel


def _failure(url: str, code: grpc.StatusCode) -> UnavailableError:
    if code in _LOST:
        return EncoderLostError(f"encoder {url} went away while it had the request ({code.name})")
    return _stranger(url, code.name)


def _stranger(url: str, what: str) -> UnavailableError:
    return UnavailableError(f"{url} answered gRPC {what}: is it a sglang-epd encoder?")
