"""The encoder's end of the payload channel: one DEALER a language server.

Offers are made before the vision forward, so that the grant is there when the
embedding is. Sockets are opened on first use and closed when unused for a while.

A message in flight when a connection breaks may be lost. So the next connection begins with
all open offers, and an unacknowledged payload is withdrawn, to be offered
again. Connections are probed, so that a frozen one breaks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    ProtocolError,
    UnavailableError,
    UnreachableError,
)
from sglang_epd.transfer import host
from sglang_epd.transfer.delivery import Granted, GrantLostError, Offered
from sglang_epd.transfer.gate import dial
from sglang_epd.transfer.reservations import QUARANTINE_S
from sglang_epd.transfer.writers import WRITES_AT_A_TIME, RemoteWriter, SharedWriter
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import tensor_frame

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_UNUSED_S = 300.0
# Until a silent connection is taken for broken, and between attempts to connect anew.
_DEAD_S = 8.0
_RECONNECT_MS = 100, 2_000
# Until a port that cannot be connected to fails its offers: a frozen server's can be.
_REACH_S = 5.0
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
# After a write of a transfer engine, or into shared memory, has failed, payloads go to that server
# another way for so long.
_ANOTHER_WAY_S = 60.0
_MAX_SOCKETS = 16_384
# A write that has had so much has not failed for want of time.
_LONG_S = 10.0
# Map the places of payloads in this machine's arenas while those are being made, then copy; a
# batch's items are there at once.
_SHARING_THREADS = 4
# A smaller payload is copied in less time than two threads take to be woken.
_SMALL_BYTES = 1 << 20


# Of a grant: ticket, item, number.
_Name = tuple[str, int, int]
_Frames = list[bytes | memoryview]


def _lost(peer: _Peer, granted: Granted, answer: wire.Ack) -> bool:
    """Whether frames of a payload may be lost: a socket mends a connection that breaks, and this
    process hears of it later. Not twice of one item."""
    offer, _ = peer.offers.get((answer.ticket, answer.item), (None, None))
    inline = granted.way == "inline" and answer.error == wire.ACK_MALFORMED
    return inline and offer is not None and not offer.renewal


def _writes_on() -> bool:
    """Has not ended."""
    return False


@dataclass
class _Peer:
    """A language server; its socket is replaced when its connection breaks."""

    endpoint: str
    # Only the server hears it, and asks by it about grants of earlier connections. A connection
    # is taken over by it.
    name: bytes
    # Grants under which something may be written yet, and of each what says whether that has
    # ended. They outlive the peer.
    grants: dict[_Name, Callable[[], bool]]
    # The endpoint without its secret.
    place: str = field(init=False)
    # Why nothing is offered there, until a connection is made.
    out_of_reach: UnreachableError | None = None
    socket: zmq.asyncio.Socket = field(init=False)
    events: zmq.asyncio.Socket = field(init=False)
    keeper: asyncio.Task[None] = field(init=False)
    used: float = field(default_factory=time.monotonic)
    # From when on this process tries again to write into its memory, after it could not.
    shares_from: float = 0.0
    # From when on a transfer engine is offered again, after a write of it has failed.
    engine_from: float = 0.0
    # An item has one offer, then one payload, open at a time.
    offers: dict[tuple[str, int], tuple[wire.Offer, Offered]] = field(default_factory=dict)
    acks: dict[_Name, asyncio.Future[wire.Ack]] = field(default_factory=dict)
    # For its remote writes: those to a server that is frozen hold up no other's.
    writing: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WRITES_AT_A_TIME, "epd-write")
    )

    @property
    def shares(self) -> bool:
        """Whether this process can write into its memory, as far as is known."""
        return time.monotonic() >= self.shares_from


class Sender:
    """Offers and delivers items. Use it from one event loop.

    Args:
        remote: writes through a transfer engine, where receivers have one.
        share_memory: whether to write into the memory of this machine's receivers.
        dead_s: after so long without a sign of life a connection is taken for broken.
        reach_s: after so long without a connection offers fail.
    """

    def __init__(
        self,
        remote: RemoteWriter | None = None,
        *,
        share_memory: bool = True,
        dead_s: float = _DEAD_S,
        reach_s: float = _REACH_S,
    ) -> None:
        self._context = zmq.asyncio.Context()
        # Three for each language server of the last minutes.
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._secret = secrets.token_bytes(32)
        self._peers: dict[str, _Peer] = {}
        # By endpoint; see `_Peer`.
        self._grants: dict[str, dict[_Name, Callable[[], bool]]] = {}
        self._closed = False
        self._remote = remote
        self._dead_ms = int(dead_s * 1e3)
        self._reach_s = reach_s
        self._process = host.this_process() if share_memory else ""
        self._shared = SharedWriter()
        self._sharing = ThreadPoolExecutor(_SHARING_THREADS, "epd-share")

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: wire.Offer) -> AsyncIterator[Offered]:
        """Ask whether an item may be sent.

        The yielded object has the answer to the offer. A grant that
        was not used when the context ends is withdrawn.

        Args:
            endpoint: the language server's payload port, as its encode request names it.
            offer: key, layout and size.

        Raises:
            ProtocolError: the endpoint is not one of ours.
            UnavailableError: the endpoint cannot be dialled, or the item is being offered.
            UnreachableError: it cannot be connected to.
        """
        peer = self._peer(endpoint)
        if peer.out_of_reach is not None:
            raise UnreachableError(peer.out_of_reach.message)
        name = offer.ticket, offer.item
        if name in peer.offers:
            # Of an earlier try at this encoder, which has yet to hear that it was given up.
            raise UnavailableError(f"item {offer.item} has an offer open already")
        offered = Offered(offer.nbytes)
        peer.offers[name] = offer, offered
        try:
            self._ask(peer, offer)
            yield offered
        finally:
            del peer.offers[name]
            if offered.granted is not None and not offered.granted.used:
                self._withdraw(peer, offered.granted.message)

    async def begin(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, rows: int, timeout_s: float
    ) -> None:
        """Deliver the first rows of an embedding whose others are being made; `deliver` ends it.

        Nothing is acknowledged. Where the receiver has not taken it, `deliver` hears of that.

        Args:
            embedding: as of `deliver`.
            rows: that are there.
            timeout_s: for a write.

        Raises:
            GrantLostError, EncodeError, UnavailableError: as of `deliver`.
        """
        payload = _payload(granted, embedding)
        if time.monotonic() >= granted.until:
            return  # `deliver` offers it anew
        peer, end = self._peer(endpoint), rows * (len(payload) // len(embedding))
        granted.used = True
        for frames in await self._write(peer, granted, payload, end, timeout_s):
            try:
                await self._send(peer, frames)
            except BaseException:
                self._withdraw(peer, granted.message)
                raise
        granted.sent, granted.used = end, False
        peer.grants[_name(granted.message)] = granted.over

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        """Deliver the embedding under a grant; returns once the receiver has taken it.

        Args:
            embedding: [tokens, width], on the host, of the size that was offered.
            timeout_s: for the acknowledgement.

        Returns:
            How it went: "inline", "shared" or "remote".

        Raises:
            GrantLostError: the grant is void.
            DeadlineError: no acknowledgement in time.
            EncodeError: the receiver dropped it, or it is not of the size that was offered:
                nothing that the user did.
            UnavailableError: the transfer engine could not write, or the language server cannot be
                connected to any more.
        """
        grant = granted.message
        payload = _payload(granted, embedding)
        peer = self._peer(endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                granted.used = True
                if time.monotonic() >= granted.until:
                    self._withdraw(peer, grant)
                    raise GrantLostError
                frames = await self._write(peer, granted, payload, len(payload), timeout_s)
                answer = await self._say_written(peer, grant, frames)
        except TimeoutError:
            raise DeadlineError("the language server did not answer in time") from None
        if answer.error == wire.ACK_NOT_GRANTED or _lost(peer, granted, answer):
            raise GrantLostError
        if answer.error:
            raise EncodeError(f"the language server dropped the payload: {answer.error}")
        return granted.way

    async def close(self) -> None:
        self._closed = True
        for endpoint in list(self._peers):
            await self._close_peer(endpoint)
        self._sharing.shutdown(wait=False, cancel_futures=True)
        self._context.destroy(linger=0)

    async def close_unused(self) -> None:
        """Close the sockets of servers that nothing was sent to for a while."""
        oldest = time.monotonic() - _UNUSED_S
        for endpoint, peer in list(self._peers.items()):
            used = peer.offers or peer.acks or _writes(peer.grants) or peer.used >= oldest
            if self._peers.get(endpoint) is peer and not used:
                await self._close_peer(endpoint)
        for endpoint in self._grants.keys() - self._peers.keys():
            if not _writes(self._grants[endpoint]):
                del self._grants[endpoint]
        await asyncio.get_running_loop().run_in_executor(self._sharing, self._shared.forget_gone)

    async def _write(
        self, peer: _Peer, granted: Granted, payload: memoryview, end: int, timeout_s: float
    ) -> Iterator[_Frames]:
        """Write a payload up to its byte `end`, from where it was written up to, where it was
        granted.

        Returns:
            The messages to send for it.
        """
        grant, last = granted.message, end == len(payload)
        peer.grants[_name(grant)] = _writes_on
        told: _Frames = [wire.encode_message(wire.Payload(*_name(grant), 0 if last else end, last))]
        raw = np.frombuffer(payload, dtype=np.uint8)[granted.sent : end]
        landing = grant.landing
        if isinstance(landing, wire.Remote):
            if self._remote is None:
                self._withdraw(peer, grant)
                raise EncodeError("a grant that this encoder did not offer to use")
            there = msgspec.structs.replace(landing, address=landing.address + granted.sent)
            writes = partial(self._remote.write, there, raw)
            write = _remote_write(writes, peer, granted.until, timeout_s)
            await self._in_thread(peer, grant, peer.writing, write)
            granted.way = "remote"
            return iter([told])
        if isinstance(landing, wire.Shared) and peer.shares and granted.way != "inline":
            at = msgspec.structs.replace(landing, offset=landing.offset + granted.sent)
            try:
                if len(raw) < _SMALL_BYTES:
                    with self._withdrawing(peer, grant):
                        self._shared.write(at, raw)
                else:
                    await self._in_thread(
                        peer, grant, self._sharing, lambda: self._shared.write(at, raw)
                    )
            except (OSError, ProtocolError) as error:
                peer.shares_from = time.monotonic() + _ANOTHER_WAY_S
                logger.warning(
                    "Embeddings go over the socket for a while: no shared memory (%s)", error
                )
            else:
                granted.way = "shared"
                return iter([told])
        if granted.way == "shared":
            granted.sent = 0  # none of it has come over the socket
        elif granted.sent and granted.socket is not peer.socket:
            # Frames may have been lost with the connection that broke.
            self._withdraw(peer, grant)
            raise GrantLostError
        granted.way, granted.socket = "inline", peer.socket
        frames = _chunks(grant, payload, granted.sent, end)
        return frames if last else itertools.chain(frames, [told])

    async def _say_written(
        self, peer: _Peer, grant: wire.Grant, messages: Iterator[_Frames]
    ) -> wire.Ack:
        """Send the rest of a payload, under which nothing is written any more after this."""
        ack: asyncio.Future[wire.Ack] = asyncio.get_running_loop().create_future()
        peer.acks[_name(grant)] = ack
        try:
            for frames in messages:
                await self._send(peer, frames)
            answer = await ack
        except BaseException:
            self._withdraw(peer, grant)
            raise
        finally:
            # An error's trace holds this frame, and so the payload.
            del peer.acks[_name(grant)], ack
        peer.grants.pop(_name(grant), None)
        return answer

    @contextlib.contextmanager
    def _withdrawing(self, peer: _Peer, grant: wire.Grant) -> Iterator[None]:
        """Around a write, which has ended where it fails in an unforeseen way."""
        try:
            yield
        except (OSError, EpdError):
            raise  # it may go on, or go another way
        except Exception:
            self._withdraw(peer, grant)
            raise

    async def _in_thread(
        self, peer: _Peer, grant: wire.Grant, pool: ThreadPoolExecutor, write: Callable[[], None]
    ) -> None:
        """Run a writer in a thread.

        When the call is cancelled the thread writes on, and an engine may write on when its
        thread has given up. The receiver is told when it has ended, and keeps the memory until
        then.
        """
        if self._closed:
            raise UnavailableError("this encoder is shutting down")
        writing = asyncio.get_running_loop().run_in_executor(pool, write)
        try:
            with self._withdrawing(peer, grant):
                await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(lambda ended: self._leave(ended, peer, grant))
            raise
        except UnavailableError:
            self._leave(writing, peer, grant)
            raise
        finally:
            # Its error's trace holds this frame, and the frame the payload.
            del writing

    def _leave(self, writing: asyncio.Future[None], peer: _Peer, grant: wire.Grant) -> None:
        """A thread has ended with a write that nothing waits for any more."""
        error = None if writing.cancelled() else writing.exception()
        if isinstance(error, UnavailableError) and error.ended is not None:
            # The engine writes on, and the receiver asks, each second.
            peer.grants[_name(grant)] = error.ended
        else:
            self._withdraw(peer, grant)

    def _withdraw(self, peer: _Peer, grant: wire.Grant) -> None:
        """Tell the receiver that nothing will be written under a grant any more."""
        peer.grants.pop(_name(grant), None)
        # The receiver asks where this message is lost.
        self._post(self._peers.get(peer.endpoint, peer), wire.Withdraw(*_name(grant)))

    def _ask(self, peer: _Peer, offer: wire.Offer) -> None:
        """Make an offer; if it is lost with the connection it is made again."""
        process = self._process if peer.shares else ""
        remote = self._remote if time.monotonic() >= peer.engine_from else None
        engine = remote.engine_name if remote else ""
        self._post(peer, msgspec.structs.replace(offer, process=process, engine=engine))

    def _post(self, peer: _Peer, message: wire.Message) -> None:
        """Send without waiting; nothing happens where the socket is closed."""
        peer.used = time.monotonic()
        with contextlib.suppress(zmq.ZMQError):
            sending = asyncio.ensure_future(peer.socket.send(wire.encode_message(message)))
            sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())

    async def _send(self, peer: _Peer, frames: _Frames) -> None:
        peer.used = time.monotonic()
        socket = peer.socket
        try:
            await socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            raise UnavailableError(f"the payload channel was closed: {error}") from None
        except asyncio.CancelledError:
            # Closing a socket cancels its unsent messages.
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise GrantLostError from None
            raise

    def _peer(self, endpoint: str) -> _Peer:
        peer = self._peers.get(endpoint)
        if peer is None:
            if self._closed:
                raise UnavailableError("this encoder is shutting down")
            peer = _Peer(endpoint, self._name_for(endpoint), self._grants.get(endpoint, {}))
            self._dial(peer)
            peer.keeper = asyncio.create_task(self._keep(peer), name="keep a payload channel")
            self._peers[endpoint], self._grants[endpoint] = peer, peer.grants
        return peer

    def _name_for(self, endpoint: str) -> bytes:
        """The same for all connections to an endpoint; a name of ROUTER's own making begins with
        a zero."""
        return b"e" + blake2b(endpoint.encode(), digest_size=16, key=self._secret).digest()

    def _dial(self, peer: _Peer) -> None:
        # An asker names the endpoint, and may not reach this machine's own sockets by it.
        if not peer.endpoint.startswith("tcp://"):
            raise ProtocolError("the reply endpoint is not a tcp:// address")
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise UnavailableError(f"no more reply endpoints can be dialled: {error}") from None
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.ROUTING_ID, peer.name)
        socket.setsockopt(zmq.HEARTBEAT_IVL, self._dead_ms // 4)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._dead_ms)
        # The other end closes the connections of hosts that are gone.
        socket.setsockopt(zmq.HEARTBEAT_TTL, self._dead_ms)
        # Another process may have the port by now.
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_HEADER_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
        try:
            events = socket.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:
            socket.close()
            raise UnavailableError(f"no more reply endpoints can be dialled: {error}") from None
        peer.socket, peer.events = socket, events
        try:
            peer.place = dial(socket, peer.endpoint)
        except zmq.ZMQError as error:
            self._hang_up(peer)
            raise UnavailableError(f"cannot dial the reply endpoint: {error}") from None

    def _hang_up(self, peer: _Peer) -> None:
        peer.socket.disable_monitor()
        peer.events.close()
        peer.socket.close()

    async def _keep(self, peer: _Peer) -> None:
        """Read answers, and dial again whenever the connection broke."""
        while True:
            reader = asyncio.create_task(self._read(peer), name="read a payload channel")
            try:
                refused = await self._broken(peer)
            finally:
                reader.cancel()
                await asyncio.wait([reader])
            self._hang_up(peer)
            if refused:
                # libzmq may give such a socket up: the next offer has another.
                del self._peers[peer.endpoint]
                self._fail(peer, UnavailableError("the language server takes no payloads of us"))
                return
            try:
                self._dial(peer)
            except UnavailableError as error:
                self._fail(peer, error)
                del self._peers[peer.endpoint]
                return
            if peer.out_of_reach is None:
                text = "Dialling a language server again, with %d open offers"
                logger.info(text, len(peer.offers))
            self._go_on(peer)

    def _go_on(self, peer: _Peer) -> None:
        """On a new connection. Not in `_keep`, whose frame would hold the last error, and so a
        payload."""
        for ack in peer.acks.values():
            if not ack.done():
                ack.set_exception(GrantLostError())
        for offer, offered in peer.offers.values():
            if not offered.decided.done():
                self._ask(peer, offer)

    async def _broken(self, peer: _Peer) -> bool:
        """Wait until a connection that stood breaks, or none comes about; whether it was refused
        instead."""
        connected = stood = False
        until = time.monotonic() + self._reach_s
        while True:
            hearing = asyncio.ensure_future(recv_monitor_message(peer.events))
            try:
                # A proxy takes connections to a port that is not there, one after the other.
                wait_s = None if connected else max(0.0, until - time.monotonic())
                heard, _ = await asyncio.wait([hearing], timeout=wait_s)
            finally:
                hearing.cancel()  # unless it is done
            if not heard:
                self._out_of_reach(peer)
                # By a new socket: what this one has queued would come late.
                return False
            event = hearing.result()["event"]
            if event & _REFUSED:
                return True
            if event == zmq.EVENT_DISCONNECTED and stood:
                return False
            connected = event != zmq.EVENT_DISCONNECTED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                stood, peer.out_of_reach = True, None

    def _out_of_reach(self, peer: _Peer) -> None:
        """Its offers fail now, and new ones at once."""
        error = UnreachableError(
            f"cannot connect to the payload port of a language server, at {peer.place}"
        )
        if peer.out_of_reach is None:
            logger.warning("In %g s: %s", self._reach_s, error)
        peer.out_of_reach = error
        self._fail(peer, error)

    async def _read(self, peer: _Peer) -> None:
        while True:
            frame = await peer.socket.recv()
            try:
                self._heed(peer, wire.decode_message(frame))
            except ProtocolError as error:
                logger.warning("Dropped a message of a language server: %s", error)
            except Exception:
                # The next ones are read all the same.
                logger.exception("Could not act upon a message of a language server")

    def _heed(self, peer: _Peer, message: wire.Message) -> None:
        if isinstance(message, wire.Ack):
            ack = peer.acks.get((message.ticket, message.item, message.grant))
            if ack is not None and not ack.done():
                ack.set_result(message)
        elif isinstance(message, wire.Grant) and _name(message) in peer.grants:
            # It is asked whether that is so.
            if peer.grants[_name(message)]():
                self._withdraw(peer, message)
        elif isinstance(message, wire.Wait | wire.Grant | wire.Decline):
            _, offered = peer.offers.get((message.ticket, message.item), (None, None))
            question = isinstance(message, wire.Grant) and message.ttl_s <= 0
            if offered is not None and not offered.decided.done() and not question:
                offered.answer(message)
                if offered.granted is not None and isinstance(message, wire.Grant):
                    peer.grants[_name(message)] = offered.granted.over
                    self._prepare(peer, message, offered.nbytes)
            elif isinstance(message, wire.Grant):
                # The caller has left.
                self._withdraw(peer, message)
        else:
            logger.warning("Dropped a %s of a language server", type(message).__name__)

    def _prepare(self, peer: _Peer, grant: wire.Grant, nbytes: int) -> None:
        """Have the place of a payload mapped by the time that the payload is there."""
        landing = grant.landing
        if nbytes < _SMALL_BYTES:
            return
        if not isinstance(landing, wire.Shared) or not peer.shares:
            return
        if not self._shared.prepared(landing, nbytes):
            self._sharing.submit(self._shared.prepare, landing, nbytes)

    async def _close_peer(self, endpoint: str) -> None:
        peer = self._peers.pop(endpoint, None)
        if peer is None:
            return  # it was refused meanwhile
        peer.keeper.cancel()
        await asyncio.wait([peer.keeper])
        self._hang_up(peer)
        peer.writing.shutdown(wait=False, cancel_futures=True)
        # Last, so that nothing is sent after it and waits for an answer.
        self._fail(peer, UnavailableError("this encoder is shutting down"))

    def _fail(self, peer: _Peer, error: Exception) -> None:
        for _, offered in peer.offers.values():
            offered.fail(error)
        for ack in peer.acks.values():
            if not ack.done():
                ack.set_exception(error)


def _writes(grants: dict[_Name, Callable[[], bool]]) -> bool:
    return not all(ended() for ended in grants.values())


def _remote_write(
    write: Callable[[float], None], peer: _Peer, until: float, timeout_s: float
) -> Callable[[], None]:
    """A write that ends in time, however long it waits for a thread, and does not begin once its
    grant is over: its memory is another's some time later. One that fails, and not for want of
    time, has the next ones go without the engine."""
    deadline = min(time.monotonic() + timeout_s, until + QUARANTINE_S / 2)

    def write_in_time() -> None:
        now = time.monotonic()
        left_s = deadline - now
        if now >= until:
            raise GrantLostError
        if left_s <= 0:
            raise UnavailableError("writes to this language server do not end")
        try:
            write(left_s)
        except UnavailableError as error:
            if left_s > _LONG_S or time.monotonic() < deadline:
                peer.engine_from = time.monotonic() + _ANOTHER_WAY_S
                # Not the error, whose trace holds the payload.
                told = peer.place, error.message
                logger.warning("Embeddings go to %s another way for a while: %s", *told)
            raise

    return write_in_time


def _payload(granted: Granted, embedding: torch.Tensor) -> memoryview:
    """An embedding's bytes.

    Raises:
        EncodeError: they are not as many as were offered.
    """
    payload = tensor_frame(embedding)
    if payload.nbytes != granted.nbytes:
        # The bytes beside it in the receiver's memory belong to another item.
        raise EncodeError(f"{payload.nbytes} bytes, {granted.nbytes} were offered")
    return payload


def _chunks(grant: wire.Grant, payload: memoryview, first: int, limit: int) -> Iterator[_Frames]:
    for begin in range(first, limit, wire.MAX_CHUNK_BYTES):
        end = min(begin + wire.MAX_CHUNK_BYTES, limit)
        last = end == len(payload)
        part = wire.Payload(*_name(grant), begin, last)
        yield [wire.encode_message(part), payload[begin:end]]


def _name(grant: wire.Grant) -> _Name:
    return grant.ticket, grant.item, grant.grant
