"""The encoder's end of the payload channel: one DEALER a language server.

Offers are made before the vision forward, so that the grant is there when the
embedding is. Sockets are opened on first use and closed when unused for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import zmq
import zmq.asyncio
from blake3 import blake3

from sglang_epd.errors import DeadlineError, EncodeError, ProtocolError, UnavailableError
from sglang_epd.transfer import host
from sglang_epd.transfer.writers import RemoteWriter, SharedWriter
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import tensor_frame

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_UNUSED_S = 300.0
_HEARTBEAT_MS = 5_000
_DEAD_MS = 20_000
_REMOTE_THREADS = 4


class GrantLostError(Exception):
    """The grant is void (it expired, or another encoder has the item): offer again."""


@dataclass
class Granted:
    """A grant, until when it may be used (`time.monotonic`), and for how many bytes."""

    message: wire.Grant
    until: float
    nbytes: int | None = None
    used: bool = False


class Offered:
    """An offer that was made.

    Attributes:
        answered: done when the receiver has said anything; the result is whether the
            offer has to wait for memory.
        decided: the grant or the decline.
    """

    def __init__(self, nbytes: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._nbytes = nbytes
        self.answered: asyncio.Future[bool] = loop.create_future()
        self.decided: asyncio.Future[Granted | wire.Decline] = loop.create_future()

    @property
    def granted(self) -> Granted | None:
        """The grant, if one has come."""
        if not self.decided.done() or self.decided.cancelled() or self.decided.exception():
            return None
        decision = self.decided.result()
        return decision if isinstance(decision, Granted) else None

    @property
    def waits(self) -> bool:
        """Whether the receiver has no memory for it, as far as is known."""
        return self.answered.done() and not self.decided.done()

    def answer(self, message: wire.Grant | wire.Decline | wire.Wait) -> None:
        if not self.answered.done():
            self.answered.set_result(isinstance(message, wire.Wait))
        if self.decided.done() or isinstance(message, wire.Wait):
            return
        if isinstance(message, wire.Grant):
            until = time.monotonic() + message.ttl_s
            self.decided.set_result(Granted(message, until, self._nbytes))
        else:
            self.decided.set_result(message)

    def fail(self, error: Exception) -> None:
        for future in (self.answered, self.decided):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it need not be asked for


@dataclass
class _Peer:
    socket: zmq.asyncio.Socket
    reader: asyncio.Task[None]
    used: float
    # Whether this process can write into its memory, as far as is known.
    shares: bool = True
    # An item has one offer, then one payload, open at a time.
    offers: dict[tuple[str, int], Offered] = field(default_factory=dict)
    acks: dict[tuple[str, int, int], asyncio.Future[wire.Ack]] = field(default_factory=dict)


class Sender:
    """Offers and delivers items. Use it from one event loop.

    Args:
        remote: writes through a transfer engine, where receivers have one.
        checksum: whether payloads carry a digest that receivers compare.
        share_memory: whether to write into the memory of this machine's receivers.
    """

    def __init__(
        self,
        remote: RemoteWriter | None = None,
        *,
        checksum: bool = False,
        share_memory: bool = True,
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._peers: dict[str, _Peer] = {}
        self._remote = remote
        self._checksum = checksum
        self._process = host.this_process() if share_memory else ""
        self._shared = SharedWriter()
        self._sharing = ThreadPoolExecutor(1, "epd-share")
        self._writing = ThreadPoolExecutor(_REMOTE_THREADS, "epd-write")

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: wire.Offer) -> AsyncIterator[Offered]:
        """Ask whether an item may be sent.

        What becomes of the offer is known from the object that is yielded. A grant that
        was not used when the context ends is withdrawn.

        Raises:
            ProtocolError: the endpoint is not one of ours.
            UnavailableError: the endpoint cannot be dialled, or the item is being offered.
        """
        peer = self._peer(endpoint)
        name = offer.ticket, offer.item
        if name in peer.offers:
            # Of an earlier try at this encoder, which has yet to hear that it was given up.
            raise UnavailableError(f"item {offer.item} has an offer open already")
        offered = peer.offers[name] = Offered(offer.nbytes)
        able = wire.Offer(
            offer.ticket,
            offer.item,
            offer.key,
            offer.layout,
            offer.nbytes,
            self._process if peer.shares else "",
            self._remote is not None,
            offer.renewal,
        )
        try:
            await self._send(peer, [wire.encode_message(able)])
            yield offered
        finally:
            del peer.offers[name]
            if offered.granted is not None and not offered.granted.used:
                self._withdraw(peer, offered.granted.message)

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        """Deliver the embedding (a host tensor) under a grant; returns once it was taken.

        Returns:
            How it went: "inline", "shared" or "remote".

        Raises:
            GrantLostError: the grant is void.
            DeadlineError: no acknowledgement in time.
            EncodeError: the receiver dropped it, or it is not of the size that was offered:
                nothing that the user did.
            UnavailableError: the transfer engine could not write.
        """
        grant = granted.message
        payload = tensor_frame(embedding)
        if granted.nbytes not in (None, payload.nbytes):
            # What lies beside it in the receiver's memory is another's.
            raise EncodeError(f"{payload.nbytes} bytes, {granted.nbytes} were offered")
        granted.used = True
        peer = self._peer(endpoint)
        if time.monotonic() >= granted.until:
            self._withdraw(peer, grant)
            raise GrantLostError
        ack: asyncio.Future[wire.Ack] = asyncio.get_running_loop().create_future()
        peer.acks[_name(grant)] = ack
        try:
            async with asyncio.timeout(timeout_s):
                how = await self._deliver(peer, grant, payload, timeout_s)
                answer = await ack
        except TimeoutError:
            raise DeadlineError("the language server did not answer in time") from None
        finally:
            del peer.acks[_name(grant)]
        if answer.error == wire.ACK_NOT_GRANTED:
            raise GrantLostError
        if answer.error:
            raise EncodeError(f"the language server dropped the payload: {answer.error}")
        return how

    async def close(self) -> None:
        for endpoint in list(self._peers):
            await self._close_peer(endpoint)
        for pool in (self._sharing, self._writing):
            pool.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    async def close_unused(self) -> None:
        """Close the sockets of servers that nothing was sent to for a while."""
        oldest = time.monotonic() - _UNUSED_S
        for endpoint, peer in list(self._peers.items()):
            if not peer.offers and not peer.acks and peer.used < oldest:
                await self._close_peer(endpoint)
        await asyncio.get_running_loop().run_in_executor(self._sharing, self._shared.forget_gone)

    async def _deliver(
        self, peer: _Peer, grant: wire.Grant, payload: memoryview, timeout_s: float
    ) -> str:
        checksum = b""
        if self._checksum:
            checksum = await asyncio.to_thread(lambda: blake3(payload).digest())
        done = wire.Payload(grant.ticket, grant.item, grant.grant, checksum=checksum)
        raw = np.frombuffer(payload, dtype=np.uint8)
        landing = grant.landing
        if isinstance(landing, wire.Remote):
            if self._remote is None:
                raise EncodeError("a grant that this encoder did not offer to use")
            remote = self._remote
            await self._write(
                peer, grant, self._writing, lambda: remote.write(landing, raw, timeout_s)
            )
            await self._send(peer, [wire.encode_message(done)])
            return "remote"
        if isinstance(landing, wire.Shared) and peer.shares:
            try:
                await self._write(
                    peer, grant, self._sharing, lambda: self._shared.write(landing, raw)
                )
            except (OSError, ProtocolError) as error:
                peer.shares = False
                logger.warning("Embeddings go over the socket: no shared memory (%s)", error)
            else:
                await self._send(peer, [wire.encode_message(done)])
                return "shared"
        try:
            await self._send_chunks(peer, grant, payload, checksum)
        except BaseException:
            self._withdraw(peer, grant)
            raise
        return "inline"

    async def _send_chunks(
        self, peer: _Peer, grant: wire.Grant, payload: memoryview, checksum: bytes
    ) -> None:
        for begin in range(0, len(payload), wire.MAX_CHUNK_BYTES):
            end = min(begin + wire.MAX_CHUNK_BYTES, len(payload))
            last = end == len(payload)
            part = wire.Payload(*_name(grant), begin, last, checksum if last else b"")
            await self._send(peer, [wire.encode_message(part), payload[begin:end]])

    async def _write(
        self, peer: _Peer, grant: wire.Grant, pool: ThreadPoolExecutor, write: Callable[[], None]
    ) -> None:
        """Run a writer in a thread.

        When the call is cancelled the thread writes on; the receiver is told when it has
        ended, and keeps the memory until then.
        """
        writing = asyncio.get_running_loop().run_in_executor(pool, write)
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(
                lambda _ended: self._withdraw_if_written(writing, peer, grant)
            )
            raise

    def _withdraw_if_written(
        self, writing: asyncio.Future[None], peer: _Peer, grant: wire.Grant
    ) -> None:
        # A write that failed may go on inside the engine: its memory stays in quarantine.
        if not writing.cancelled() and writing.exception() is None:
            self._withdraw(peer, grant)

    def _withdraw(self, peer: _Peer, grant: wire.Grant) -> None:
        """Tell the receiver that nothing will be written under a grant any more."""
        message = wire.encode_message(wire.Withdraw(*_name(grant)))
        # If it is not told, it finds out when the grant expires.
        with contextlib.suppress(zmq.ZMQError):
            sending = asyncio.ensure_future(peer.socket.send(message, zmq.NOBLOCK))
            sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())

    async def _send(self, peer: _Peer, frames: list[bytes | memoryview]) -> None:
        peer.used = time.monotonic()
        try:
            await peer.socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            raise UnavailableError(f"the payload channel was closed: {error}") from None

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
            peer = self._peers[endpoint]
            if isinstance(message, wire.Ack):
                ack = peer.acks.get((message.ticket, message.item, message.grant))
                if ack is not None and not ack.done():
                    ack.set_result(message)
            elif isinstance(message, wire.Wait | wire.Grant | wire.Decline):
                offered = peer.offers.get((message.ticket, message.item))
                if offered is not None and not offered.decided.done():
                    offered.answer(message)
                elif isinstance(message, wire.Grant):
                    # Nobody here wants it any more.
                    self._withdraw(peer, message)
            else:
                logger.warning("Dropped a %s from %s", type(message).__name__, endpoint)

    async def _close_peer(self, endpoint: str) -> None:
        peer = self._peers.pop(endpoint)
        closing = UnavailableError("this encoder is shutting down")
        for offered in peer.offers.values():
            offered.fail(closing)
        for ack in peer.acks.values():
            if not ack.done():
                ack.set_exception(closing)
        peer.reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await peer.reader
        peer.socket.close(linger=0)


def _name(grant: wire.Grant) -> tuple[str, int, int]:
    return grant.ticket, grant.item, grant.grant
