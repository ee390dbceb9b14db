"""The encoder's gRPC server (`--grpc-mode`), on `--port`.

sglang_epd.Encoder     Encode and Status, for this package's language servers (`wire.rpc`)
grpc.health.v1         Check and Watch, by any name; serving as `GET /health` says
reflection             the names of the services

`encoder.sglang_rpc` adds SGLang's own service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Protocol

import grpc
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.responses import Response

from sglang_epd.encoder.answering import Answering
from sglang_epd.encoder.service import EncoderService
from sglang_epd.errors import ConfigError
from sglang_epd.wire import rpc

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# As of HTTP: until a connection has begun to speak, and while it says nothing more.
_HANDSHAKE_S, _IDLE_S = 20, 75
# Of a body that was refused: how long nothing may come of it, and how long all of it may take,
# before its asker is answered all the same.
_REST_SILENCE_S, _REST_S = 1.0, 30.0


class Call:
    """An encode request over gRPC; an `Exchange`."""

    def __init__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self._messages = messages
        self.headers = {name: _text(value) for name, value in context.invocation_metadata() or ()}
        self.headers["content-length"] = self.headers.get(rpc.LENGTH, "")

    def pieces(self) -> AsyncIterator[bytes]:
        return self._messages

    async def gone(self) -> None:
        # The task of its handler is cancelled then.
        await asyncio.Event().wait()


class Service(Protocol):
    """Methods of a server, which take and give bytes."""

    name: str

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]: ...

    def close(self) -> None: ...


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
        other: Service | None = None,
    ) -> None:
        self._answering = answering
        options = [
            ("grpc.max_receive_message_length", answering.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", _IDLE_S * 1000),
            # A second encoder at the port would get every other request.
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        own = {
            "Encode": grpc.stream_unary_rpc_method_handler(self._encode),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
        }
        services = {rpc.SERVICE: own}
        if other is not None:
            services[other.name] = other.handlers()
        handlers = map(grpc.method_handlers_generic_handler, services, services.values())
        self._server.add_generic_rpc_handlers(tuple(handlers))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(answering.service), self._server)
        names = [*services, _HEALTH, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
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

    async def _status(self, _message: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        state = self._answering.service.status()
        return msgspec.json.encode({**state, "tasks": len(asyncio.all_tasks())})


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


class _Health(health_pb2_grpc.HealthServicer):
    """Of the server as a whole, whichever service is named, as SGLang's own."""

    def __init__(self, service: EncoderService) -> None:
        self._service = service

    async def Check(self, _request: Any, _context: grpc.aio.ServicerContext) -> Any:
        return health_pb2.HealthCheckResponse(status=1 if self._service.healthy else 2)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        yield await self.Check(request, context)


def _text(value: str | bytes) -> str:
    """A header as HTTP's are: a character a byte."""
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return raw.decode("latin-1")
