"""The receiver thread in the scheduler process.

It owns the ledger and two ROUTER sockets: `payload` (TCP, encoders) and `control`
(a Unix socket in a folder only this user may enter, tokenizer). A thread of its own
answers offers while the scheduler is inside a forward pass, so that a grant never
waits for one. The scheduler talks to it through two queues; each direction has an
inproc socket that wakes the other side, and the scheduler's end of it goes into the
poller that a sleeping scheduler waits on.

What a peer sends is never trusted: whatever is malformed, oversized, unknown or
late is counted, logged once a kind, and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from sglang_epd.errors import EpdError, ProtocolError, from_code
from sglang_epd.transfer.ledger import Ledger, Settled
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import read_tensor, spec_bytes

logger = logging.getLogger(__name__)

_WAKE = "inproc://sglang-epd-receiver"
# An offer may overtake the announcement of its ticket: they come over two sockets. It is
# held for as long as a starved tokenizer process may take to get the latter out.
_HOLD_S = 2.0
_MAX_HELD = 1024
# How many messages one turn takes from a socket before it looks at the other one.
_BURST = 64
_EXPIRY_CHECK_MS = 500


@dataclass(frozen=True)
class _Held:
    peer: bytes
    offer: wire.Offer
    until: float


class Receiver:
    """Runs the ledger behind its sockets.

    Args:
        bind_host: address the payload socket listens on.
        advertise_host: address encoders are told to dial.
        control_path: Unix socket path of the control channel.
        max_item_bytes: largest embedding that is accepted.
    """

    def __init__(
        self,
        bind_host: str,
        advertise_host: str,
        control_path: Path,
        max_item_bytes: int = 2 << 30,
    ) -> None:
        self._ledger = Ledger(max_item_bytes)
        self._context = zmq.Context()
        self._payload = self._context.socket(zmq.ROUTER)
        self._payload.setsockopt(zmq.LINGER, 0)
        self._payload.setsockopt(zmq.IPV6, 1)
        # ZMQ drops the connection of a peer whose frame is longer than this.
        self._payload.setsockopt(zmq.MAXMSGSIZE, max_item_bytes)
        port = self._payload.bind_to_random_port(f"tcp://{_bracketed(bind_host)}")
        self.endpoint = f"tcp://{_bracketed(advertise_host)}:{port}"
        control_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(f"ipc://{control_path}")

        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._settled: queue.SimpleQueue[Settled] = queue.SimpleQueue()
        name = f"{_WAKE}-{id(self)}"
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"{name}-in")
        self._knock = self._context.socket(zmq.PUSH)
        self._knock.connect(f"{name}-in")
        # The scheduler's end: readable whenever a request has settled.
        self.wake_socket = self._context.socket(zmq.PULL)
        self.wake_socket.bind(f"{name}-out")
        self._ring = self._context.socket(zmq.PUSH)
        self._ring.connect(f"{name}-out")

        self._held: deque[_Held] = deque()
        self.dropped: Counter[str] = Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="epd-receiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every socket."""
        self._stopping = True
        _wake(self._knock)
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    # The scheduler's side.

    def claim(self, rid: str, expect: wire.Expect) -> None:
        """Wait for the items of `expect` on behalf of the scheduler request `rid`."""
        self._submit(lambda: self._ledger.claim(rid, expect, time.monotonic()))

    def abandon(self, rid: str) -> None:
        """Stop waiting for `rid`."""
        self._submit(lambda: self._ledger.abandon(rid))

    def take_settled(self) -> list[Settled]:
        """Requests that can go on; never blocks."""
        settled = []
        while not self._settled.empty():
            settled.append(self._settled.get_nowait())
        while self.wake_socket.poll(0):
            self.wake_socket.recv(zmq.NOBLOCK)
        # A request that settled between the two loops has rung already.
        while not self._settled.empty():
            settled.append(self._settled.get_nowait())
        return settled

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        _wake(self._knock)

    # The thread's side.

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._control, self._payload, self._inbox):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(_EXPIRY_CHECK_MS))
            while self._inbox in ready and self._inbox.poll(0):
                self._inbox.recv()
            while not self._commands.empty():
                self._commands.get_nowait()()
            if self._control in ready:
                self._drain(self._control, self._on_control)
            self._answer_held()
            if self._payload in ready:
                self._drain(self._payload, self._on_payload)
            self._ledger.expire(time.monotonic())
            settled = self._ledger.take_settled()
            for outcome in settled:
                self._settled.put(outcome)
            if settled:
                _wake(self._ring)

    def _drain(self, socket: zmq.Socket, handle: Callable[[bytes, list[zmq.Frame]], None]) -> None:
        for _ in range(_BURST):
            try:
                peer, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                handle(peer.bytes, frames)
            except EpdError as error:
                self._drop(type(error).__name__, str(error))
            except Exception:
                # Whatever it is, the next message must still be read.
                self.dropped["internal"] += 1
                logger.exception("Could not handle a message")

    def _drop(self, kind: str, detail: str) -> None:
        self.dropped[kind] += 1
        if self.dropped[kind] == 1:
            logger.warning("Dropped a message on the payload channel (%s): %s", kind, detail)

    def _on_control(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        message = _message(frames)
        if isinstance(message, wire.Hello):
            self._send(self._control, peer, wire.Welcome(self.endpoint))
        elif isinstance(message, wire.Expect):
            self._ledger.expect(message, time.monotonic())
        elif isinstance(message, wire.Fail):
            self._ledger.fail(message.ticket, from_code(message.code, message.message))
        elif isinstance(message, wire.Cancel):
            self._ledger.cancel(message.ticket)
        else:
            raise ProtocolError(f"{type(message).__name__} does not belong on this channel")

    def _on_payload(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        message = _message(frames)
        if isinstance(message, wire.Offer):
            if message.nbytes != spec_bytes(message.layout.embedding):
                raise ProtocolError("offer: size and shape disagree")
            self._answer(_Held(peer, message, time.monotonic() + _HOLD_S))
        elif isinstance(message, wire.Payload):
            self._send(self._payload, peer, self._take(message, frames))
        else:
            raise ProtocolError(f"{type(message).__name__} does not belong on this channel")

    def _answer_held(self) -> None:
        for _ in range(len(self._held)):
            self._answer(self._held.popleft())

    def _answer(self, held: _Held) -> None:
        """Answer an offer, or hold it if its ticket may yet be announced."""
        answer = self._ledger.offer(held.offer)
        unknown = isinstance(answer, wire.Decline) and answer.reason == wire.DECLINE_UNKNOWN
        if unknown and time.monotonic() < held.until and len(self._held) < _MAX_HELD:
            self._held.append(held)
        else:
            self._send(self._payload, held.peer, answer)

    def _take(self, message: wire.Payload, frames: list[zmq.Frame]) -> wire.Ack:
        try:
            offer = self._ledger.granted_offer(message)
            if len(frames) != 2:
                raise ProtocolError(f"payload of {len(frames) - 1} frames, expected 1")
            self._ledger.fill(message, read_tensor(frames[1].buffer, offer.layout.embedding))
        except ProtocolError as error:
            self._drop("payload", error.message)
            return wire.Ack(message.ticket, message.item, message.grant, error.message)
        return wire.Ack(message.ticket, message.item, message.grant)

    def _send(self, socket: zmq.Socket, peer: bytes, message: wire.Message) -> None:
        # A ROUTER drops what it sends to a peer that has gone.
        try:
            socket.send_multipart([peer, wire.encode_message(message)], zmq.NOBLOCK)
        except zmq.Again:
            self._drop("peer_not_reading", type(message).__name__)


def _wake(socket: zmq.Socket) -> None:
    # One that is full has a wake-up underway already.
    with contextlib.suppress(zmq.Again):
        socket.send(b"", zmq.NOBLOCK)


def _message(frames: list[zmq.Frame]) -> wire.Message:
    if not frames:
        raise ProtocolError("empty message")
    return wire.decode_message(frames[0].buffer)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
