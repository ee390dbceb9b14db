"""The tokenizer's end of the control channel to its own scheduler process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import zmq
import zmq.asyncio

from sglang_epd.errors import EpdError, ProtocolError, UnavailableError
from sglang_epd.wire import messages as wire

logger = logging.getLogger(__name__)


class Control:
    """Tells the receiver what to expect, and what will not come.

    Messages are queued by ZMQ and never block the caller. Use it from one event loop.
    """

    def __init__(self, control_path: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{control_path}")
        self._endpoint: str | None = None
        self._lock = asyncio.Lock()

    async def endpoint(self, timeout_s: float) -> str:
        """Where encoders reach the receiver; asked once, then remembered.

        Raises:
            UnavailableError: the scheduler did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                if self._endpoint is None:
                    await self._send(wire.Hello())
                    reply = wire.decode_message(await self._socket.recv())
                    if not isinstance(reply, wire.Welcome):
                        raise ProtocolError(f"expected Welcome, got {type(reply).__name__}")
                    self._endpoint = reply.endpoint
                return self._endpoint
        except TimeoutError:
            raise UnavailableError(
                f"the scheduler's receiver did not answer within {timeout_s:g} s"
            ) from None

    async def expect(self, message: wire.Expect) -> None:
        """Announce a request before any encoder is asked for its items.

        Raises:
            UnavailableError: the scheduler's receiver reads nothing any more.
        """
        await self._send(message)

    async def fail(self, ticket: str, error: EpdError) -> None:
        """End a request that no encoder could serve."""
        await self._tell(wire.Fail(ticket, error.code, error.message))

    async def cancel(self, ticket: str) -> None:
        """End a request whose client went away."""
        await self._tell(wire.Cancel(ticket))

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _tell(self, message: wire.Fail | wire.Cancel) -> None:
        try:
            await self._send(message)
        except UnavailableError as error:
            # Without it the request ends too, at its deadline.
            logger.warning("%s is not told: %s", type(message).__name__, error)

    async def _send(self, message: wire.Message) -> None:
        try:
            await self._socket.send(wire.encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            raise UnavailableError("the scheduler's receiver does not read") from None
