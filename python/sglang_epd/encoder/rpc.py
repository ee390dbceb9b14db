"""The encoder's gRPC server (`--grpc-mode`), on `--port`.

sglang_epd.Encoder     Encode and Status, for this package's language servers (`wire.rpc`)
grpc.health.v1         Check and Watch, by any name; serving as `GET /health` says

`encoder.sglang_rpc` adds SGLang's own service. What asks for no token reads no message: gRPC's
bound on one is the same for all methods of a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING

import grpc
import msgspec
from grpc_health.v1 import health_pb2
from starlette.responses import Response

from sglang_epd.encoder.answering import Answering
from sglang_epd.errors import ConfigError
from sglang_epd.wire import rpc

if TYPE_CHECKING:  # it imports this module
    from sglang_epd.encoder.sglang_rpc import SglangService

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# As of HTTP: until a connection has begun to speak, and while it says nothing more.
_HANDSHAKE_S, _IDLE_S = 20, 75
# Of a body that was refused: how long nothing may come of it, and how long all of it may take,
# before its asker is answered all the same.
_REST_SILENCE_S, _REST_S = 1.0, 30.0
# The largest bound on a message that gRPC takes.
_MOST_BYTES = 2**31 - 1


class Call:
    """An encode request over gRPC; an `Exchange`."""

    def __init__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self._messages = messages
        self.headers = _headers(context)
        self.headers["content-length"] = self.headers.get(rpc.LENGTH, "")

    def pieces(self) -> AsyncIterator[bytes]:
        return self._messages

    async def gone(self) -> None:
        # The task of its handler is cancelled then.
        await asyncio.Event().wait()


class RpcServer:
    """Listens from `start` to `stop`.

    Args:
        answering: of encode requests.
        address: host and port, bound at once.
        other: a service beside, which is closed at the end.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        answering: Answering,
        address: str,
        other: SglangService | None = None,
    ) -> None:
        self._answering = answering
        options = [
            ("grpc.max_receive_message_length", min(answering.max_body_bytes, _MOST_BYTES)),
            ("grpc.max_send_message_length", -1),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
            # A second encoder at the port would get every other request.
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        own = {
            "Encode": grpc.stream_unary_rpc_method_handler(self._encode),
            # No message is read that is not asked for, as of a stream.
            "Status": grpc.stream_unary_rpc_method_handler(self._status),
        }
        health = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        services = {rpc.SERVICE: own, _HEALTH: health}
        if other is not None:
            services[other.name] = other.handlers()
        handlers = map(grpc.method_handlers_generic_handler, services, services.values())
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self._other = other
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"--port: cannot listen at {address}: {error}") from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """End; calls that are in work have so long."""
        await self._server.stop(grace_s)
        if self._other is not None:
            self._other.close()

    async def _encode(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        response = await self._answering.answer(Call(messages, context))
        if response.status_code != HTTPStatus.UNAUTHORIZED:  # nothing is read of strangers
            await _drop_rest(messages)
        set_status(context, response)
        return bytes(response.body)

    async def _status(
        self, _messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        return msgspec.json.encode(self._answering.status(_headers(context)))

    async def _check(
        self, _messages: AsyncIterator[bytes], _context: grpc.aio.ServicerContext
    ) -> bytes:
        """Of the server as a whole, whichever service is named, as SGLang's own."""
        status = 1 if self._answering.service.healthy else 2
        return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())

    async def _watch(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        yield await self._check(messages, context)


async def _drop_rest(messages: AsyncIterator[bytes]) -> None:
    """Take what is left of a body, and drop it.

    An answer ends the call. gRPC's client, in the middle of a write, may find the write broken
    before it finds the answer, and then has a call that was lost: a refusal would count as an
    encoder that went away.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + _REST_S
    try:
        async with asyncio.timeout(_REST_SILENCE_S) as patience:
            async for _ in messages:
                patience.reschedule(min(clock() + _REST_SILENCE_S, until))
    except TimeoutError:
        pass  # an asker that has stopped writing meets no broken write


def set_status(context: grpc.aio.ServicerContext, response: Response) -> None:
    again = response.headers.get("Retry-After", "")
    context.set_trailing_metadata(((rpc.CODE, str(response.status_code)), (rpc.AGAIN, again)))


def _headers(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {name: _text(value) for name, value in context.invocation_metadata() or ()}


def _text(value: str | bytes) -> str:
    """A header as HTTP's are: a character a byte."""
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return raw.decode("latin-1")
