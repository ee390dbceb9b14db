"""The encoder's end of the payload channel: one DEALER a language server.

Offers are made before the vision forward, so that the grant is there when the
embedding is. Sockets are opened on first use and closed when unused for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

import torch
import zmq
import zmq.asyncio

from sglang_epd.errors import DeadlineError, ProtocolError, UnavailableError
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import tensor_frame

logger = logging.getLogger(__name__)

_UNUSED_S = 300.0
_HEARTBEAT_MS = 5_000
_DEAD_MS = 20_000

_Answer = wire.Grant | wire.Decline | wire.Ack


@dataclass
class _Peer:
    socket: zmq.asyncio.Socket
    reader: asyncio.Task[None]
    used: float
    # One item has at most one question open: its offer, then its payload.
    open: dict[tuple[str, int], asyncio.Future[_Answer]] = field(default_factory=dict)


class Sender:
    """Offers and delivers items. Use it from one event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._peers: dict[str, _Peer] = {}

    async def offer(
        self, endpoint: str, message: wire.Offer, timeout_s: float
    ) -> wire.Grant | wire.Decline:
        """Ask whether an item may be sent.

        Raises:
            DeadlineError: no answer in time.
            ProtocolError: the endpoint is not one of ours.
            UnavailableError: the endpoint cannot be dialled, or the sender was closed.
        """
        answer = await self._ask(endpoint, message.ticket, message.item, [message], timeout_s)
        if isinstance(answer, wire.Ack):
            raise ProtocolError("receiver acknowledged an offer")
        return answer

    async def deliver(
        self, endpoint: str, message: wire.Payload, embedding: torch.Tensor, timeout_s: float
    ) -> None:
        """Send the embedding (a host tensor) under a grant and wait until it was taken.

        Raises:
            DeadlineError: no acknowledgement in time.
            ProtocolError: the receiver dropped it.
        """
        frames: list[wire.Message | memoryview] = [message, tensor_frame(embedding)]
        answer = await self._ask(endpoint, message.ticket, message.item, frames, timeout_s)
        if not isinstance(answer, wire.Ack):
            raise ProtocolError(f"receiver answered {type(answer).__name__} to a payload")
        if answer.error:
            raise ProtocolError(f"receiver dropped the payload: {answer.error}")

    async def close(self) -> None:
        for endpoint in list(self._peers):
            await self._close_peer(endpoint)
        self._context.destroy(linger=0)

    async def close_unused(self) -> None:
        """Close the sockets of servers that nothing was sent to for a while."""
        oldest = time.monotonic() - _UNUSED_S
        for endpoint, peer in list(self._peers.items()):
            if not peer.open and peer.used < oldest:
                await self._close_peer(endpoint)

    async def _ask(
        self,
        endpoint: str,
        ticket: str,
        item: int,
        parts: list[wire.Message | memoryview],
        timeout_s: float,
    ) -> _Answer:
        peer = self._peer(endpoint)
        peer.used = time.monotonic()
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        previous = peer.open.get((ticket, item))
        if previous is not None and not previous.done():
            raise ProtocolError(f"item {item} has a question open already")
        peer.open[ticket, item] = answer
        frames = [
            wire.encode_message(part) if isinstance(part, wire.Message) else part for part in parts
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await peer.socket.send_multipart(frames, copy=False)
                return await answer
        except TimeoutError:
            raise DeadlineError("the language server did not answer in time") from None
        finally:
            if peer.open.get((ticket, item)) is answer:
                del peer.open[ticket, item]

    def _peer(self, endpoint: str) -> _Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            socket = self._dial(endpoint)
            reader = asyncio.create_task(self._read(endpoint, socket), name=f"read {endpoint}")
            peer = self._peers[endpoint] = _Peer(socket, reader, time.monotonic())
        return peer

    def _dial(self, endpoint: str) -> zmq.asyncio.Socket:
        # An asker names the endpoint, and may not reach this machine's own sockets by it.
        if not endpoint.startswith("tcp://"):
            raise ProtocolError("the reply endpoint is not a tcp:// address")
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise UnavailableError(f"no more reply endpoints can be dialled: {error}") from None
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise UnavailableError(f"cannot dial the reply endpoint: {error}") from None
        return socket

    async def _read(self, endpoint: str, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            try:
                message = wire.decode_message(frame)
            except ProtocolError as error:
                logger.warning("Dropped a message from %s: %s", endpoint, error)
                continue
            if not isinstance(message, wire.Grant | wire.Decline | wire.Ack):
                logger.warning("Dropped a %s from %s", type(message).__name__, endpoint)
                continue
            answer = self._peers[endpoint].open.get((message.ticket, message.item))
            if answer is not None and not answer.done():
                answer.set_result(message)

    async def _close_peer(self, endpoint: str) -> None:
        peer = self._peers.pop(endpoint)
        for answer in peer.open.values():
            if not answer.done():
                answer.set_exception(UnavailableError("this encoder is shutting down"))
        peer.reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await peer.reader
        peer.socket.close(linger=0)
