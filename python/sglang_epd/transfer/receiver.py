"""The receiver thread of a language server: one a server, for all its ranks.

It owns the ledger, the arena and two ROUTER sockets: `payload` (TCP, encoders, behind a
gate) and `control` (a Unix socket in a folder only this user may enter: the tokenizer, and
every scheduler). A thread of its own answers offers while its process is inside a forward
pass, so that a grant never waits for one.

A peer's message is never trusted: one that is malformed, oversized, unknown or late is
counted, logged once a kind, and dropped.

An encoder's connection has a name that outlives a break of it. A message to an encoder may
be lost with its connection: the encoder then offers anew, and is asked about its grants.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from sglang_epd.errors import EpdError, ProtocolError, from_code
from sglang_epd.tally import Tally
from sglang_epd.transfer import host
from sglang_epd.transfer.arena import SLOTS, Arena
from sglang_epd.transfer.blocks import Block
from sglang_epd.transfer.control import receivers_here
from sglang_epd.transfer.gate import Gate
from sglang_epd.transfer.ledger import Handle, Ledger
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.transfer.reservations import Reservations
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import spec_bytes
from sglang_epd.wire.urls import bracketed

logger = logging.getLogger(__name__)

# An offer may overtake the announcement of its ticket: they come over two sockets. It is
# held for as long as a starved tokenizer process may take to get the latter out.
_HOLD_S = 2.0
# Bytes of such offers in all, and the least that one counts. Where there are too many,
# the connection with the most is not waited for.
_MAX_UNKNOWN_BYTES = 8 << 20
_MIN_UNKNOWN_BYTES = 8 << 10
# How many messages one turn takes from a socket before it looks at the other one.
_BURST = 64
# Messages, of at most a frame of payload each, that libzmq may buffer for one connection before
# this thread has read them.
_RECEIVE_HWM = 32
# Messages for an encoder that reads nothing; more than it can have items in work.
_SEND_HWM = 8192
# How often an encoder is asked about a grant that it may still be using.
_ASK_S = 1.0
_TICK_MS = 500
# While offers wait, readers' drops are looked for this often.
_WAITING_TICK_MS = 5
_HOUSEKEEPING_S = 0.1
# After this long without a payload the arena's memory goes back to the system.
_IDLE_S = 15.0


# An offer's connection, ticket and item.
_Name = tuple[bytes, str, int]


@dataclass
class _Held:
    """An offer without an answer yet."""

    peer: bytes
    unread: wire.UnreadOffer
    nbytes: int
    since: float
    # Once its ticket is known.
    offer: wire.Offer | None = None
    waits: bool = False
    # Whether another encoder has offered the item since: this one may have fallen silent.
    stale: bool = False

    @property
    def name(self) -> _Name:
        return self.peer, self.unread.ticket, self.unread.item

    @property
    def handles(self) -> tuple[Handle, ...]:
        """By which the ledger may name it once its ticket is known."""
        one = self.unread
        return one.ticket, (one.ticket, one.item), one.key


def _read(unread: wire.UnreadOffer) -> wire.Offer:
    offer = unread.read()
    if offer.nbytes != spec_bytes(offer.layout.embedding):
        raise ProtocolError("offer: size and shape disagree")
    return offer


class Receiver:
    """Runs the ledger behind its sockets.

    Args:
        bind_host: address the payload socket listens on.
        advertise_host: address encoders dial.
        control_path: Unix socket path of the control channel.
        budget_bytes: embeddings granted, received, being read or kept take at most this.
        cache_bytes: those of them that are idle may take this, until a grant needs
            their room.
        readers: processes that read embeddings, numbered from 0.
        grant_ttl_s: how long an encoder may take from the grant to the payload.
        engine: transfer engine that encoders may write through.
        tally: counts events.
        on_death: called in the thread when it ends without `stop`.

    Raises:
        OSError: an address cannot be bound, or the arena not made.
    """

    def __init__(
        self,
        bind_host: str,
        advertise_host: str,
        control_path: Path,
        *,
        budget_bytes: int,
        readers: int = 1,
        cache_bytes: int = 0,
        grant_ttl_s: float = 30.0,
        engine: MooncakeEngine | None = None,
        tally: Tally | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_death = on_death
        self.tally = tally or Tally()
        self._arena = Arena.create(budget_bytes, readers)
        self._readers = readers
        self._engine = engine
        if engine is not None:
            # Memory that is registered with a network card is pinned; it stays.
            self._arena.keep_pages()
            engine.register(self._arena.machine_address, len(self._arena.data))
        self._reservations = Reservations(
            len(self._arena.data),
            SLOTS,
            readers,
            drops=self._arena.drops,
            reset=self._arena.reset,
            writer_lives=lambda process: (
                host.lives(process) if host.shares_memory(process) else None
            ),
            kept_bytes=min(cache_bytes, budget_bytes),
        )
        self._ledger = Ledger(self._reservations, grant_ttl_s, self.tally)
        self._context = zmq.Context()
        self._payload = self._context.socket(zmq.ROUTER)
        self._payload.setsockopt(zmq.LINGER, 0)
        self._payload.setsockopt(zmq.IPV6, 1)
        self._payload.setsockopt(zmq.RCVHWM, _RECEIVE_HWM)
        self._payload.setsockopt(zmq.SNDHWM, _SEND_HWM)
        # A connection that dials again under its name takes over; a peer that is gone is an error.
        self._payload.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._payload.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._gate = Gate(self._context, self._payload)
        # ZMQ drops the connection of a peer whose frame is longer than this.
        longest = max(wire.MAX_CHUNK_BYTES, wire.MAX_HEADER_BYTES)
        self._payload.setsockopt(zmq.MAXMSGSIZE, longest)
        try:
            port = self._payload.bind_to_random_port(f"tcp://{bracketed(bind_host)}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._arena.close()
            raise OSError(f"cannot listen on {bind_host}: {error}") from error
        self.endpoint = self._gate.address(advertise_host, port)
        control_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        # A lost Settled is memory that never comes back.
        self._control.setsockopt(zmq.SNDHWM, 0)
        self._control.bind(f"ipc://{control_path}")
        self._control.bind(f"inproc://{control_path}")
        self._control_path = control_path
        receivers_here[control_path] = self._context
        self._alarm = self._context.socket(zmq.PULL)
        self._alarm.bind(f"inproc://stop-{id(self)}")

        self._held: dict[_Name, _Held] = {}
        # Of those, the ones whose ticket is known, by each of their handles.
        self._by_handle: defaultdict[Handle, dict[_Name, _Held]] = defaultdict(dict)
        # The others; and their bytes, by connection.
        self._unannounced: dict[_Name, _Held] = {}
        self._unknown: Counter[bytes] = Counter()
        self._seen_news = -1
        self._next_housekeeping = 0.0
        self._next_expiry = 0.0
        self._next_question = 0.0
        self._last_payload: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="epd-receiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close every socket, those of this process's `Claims` as well."""
        self._stopping = True
        with self._context.socket(zmq.PUSH) as alarm:
            alarm.connect(f"inproc://stop-{id(self)}")
            alarm.send(b"")
            self._thread.join(timeout=5)
        if receivers_here.get(self._control_path) is self._context:
            del receivers_here[self._control_path]
        self._context.destroy(linger=0)
        self._arena.close()

    def _live(self) -> None:
        try:
            self._run()
        except BaseException:
            if not self._stopping:
                logger.critical("The receiver has died, nothing is received", exc_info=True)
                self._on_death()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._control, self._payload, self._gate.socket, self._alarm):
            poller.register(socket, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(_WAITING_TICK_MS if self._held else _TICK_MS))
            try:
                if self._control in ready:
                    self._drain(self._control, self._on_control)
                if self._payload in ready:
                    self._drain(self._payload, self._on_payload)
                if self._gate.socket in ready:
                    self._gate.answer()
                self._go_on(time.monotonic())
            except Exception:
                # Every request of this server needs this thread: it must not end.
                self.tally.add("dropped", "internal")
                logger.exception("The receiver stumbled")
                time.sleep(_HOUSEKEEPING_S)

    def _go_on(self, now: float) -> None:
        """Act on the received messages and on the time."""
        if now >= self._next_housekeeping:
            self._keep_house(now)
        self._answer_held(now)
        for peer, message in self._ledger.take_messages():
            self._send(self._control, peer, message)

    def _drain(self, socket: zmq.Socket, handle: Callable[[bytes, list[zmq.Frame]], None]) -> None:
        for _ in range(_BURST):
            try:
                # A name is a few bytes: a frame that is not copied costs more.
                peer = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames = [socket.recv(copy=False)]
            while frames[-1].more:
                frames.append(socket.recv(copy=False))
            try:
                handle(peer, frames)
            except EpdError as error:
                self._drop(type(error).__name__, str(error))
            except Exception:
                # The next message must still be read.
                self.tally.add("dropped", "internal")
                logger.exception("Could not handle a message")

    def _drop(self, kind: str, detail: str) -> None:
        self.tally.add("dropped", kind)
        if self.tally.counts["dropped", kind] == 1:
            logger.warning("Dropped a message on the payload channel (%s): %s", kind, detail)

    def _on_control(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        message = wire.decode_message(frames[0].buffer, wire.MAX_CONTROL_BYTES)
        now = time.monotonic()
        if isinstance(message, wire.Hello):
            address = self._arena.address
            welcome = wire.Welcome(
                self.endpoint, address.path, address.size, address.seal, address.readers
            )
            self._send(self._control, peer, welcome)
        elif isinstance(message, wire.Expect):
            self._ledger.expect(message, now, watcher=peer)
        elif isinstance(message, wire.Again):
            self._send(self._control, message.expect.announcer.encode(), message)
        elif isinstance(message, wire.Claim):
            if message.first_reader + message.readers > self._readers:
                raise ProtocolError("claim: there are not that many readers")
            self._ledger.claim(peer, message, now)
        elif isinstance(message, wire.TakePart):
            self._ledger.hand_part(peer, message)
        elif isinstance(message, wire.Abandon):
            self._ledger.abandon(peer, message.claim, now)
        elif isinstance(message, wire.Fail):
            self._ledger.fail(message.ticket, from_code(message.code, message.message), now)
        elif isinstance(message, wire.Cancel):
            self._ledger.cancel(message.ticket, now)
        else:
            raise ProtocolError(f"{type(message).__name__} does not belong on this channel")

    def _on_payload(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        message = wire.decode_from_encoder(frames[0].buffer)
        now = time.monotonic()
        if isinstance(message, wire.UnreadOffer):
            self.tally.add("offers")
            # One that is held already was sent again, by an encoder that lost its connection.
            held = _Held(peer, message, len(frames[0]), now)
            self._let_go(held)
            for older in self._by_handle.get((message.ticket, message.item), {}).values():
                older.stale = True
            self._answer(held, now)
        elif isinstance(message, wire.Payload):
            self._on_bytes(peer, message, frames[1:], now)
        elif self._ledger.withdraw(message):
            self.tally.add("withdrawals")

    def _on_bytes(
        self, peer: bytes, message: wire.Payload, frames: list[zmq.Frame], now: float
    ) -> None:
        self._last_payload = now
        block = self._ledger.granted(message)
        error = ""
        if block is None:
            if message.last or frames:
                # Its memory may be in quarantine until this. Of a beginning it may be written on.
                self._ledger.withdraw(message)
            error = wire.ACK_NOT_GRANTED
            self.tally.add("dropped", error)
        else:
            try:
                self._take(block, message, frames)
            except ProtocolError as problem:
                self._ledger.withdraw(message)
                error = wire.ACK_MALFORMED
                self._drop("payload", problem.message)
        if not error and message.last:
            self._ledger.fill(message, now)
        if error or message.last:
            self._tell(peer, wire.Ack(message.ticket, message.item, message.grant, error))

    def _take(self, block: Block, message: wire.Payload, frames: list[zmq.Frame]) -> None:
        """Put a frame where it belongs; after the last one, see that all is there."""
        if len(frames) > 1:
            raise ProtocolError(f"payload of {len(frames)} frames, expected one at most")
        if frames:
            chunk = np.frombuffer(frames[0].buffer, dtype=np.uint8)
            end = message.offset + len(chunk)
            if message.offset != block.written or end > block.nbytes:
                raise ProtocolError("payload: a frame that does not follow the last one")
            self._arena.span(block.offset, block.nbytes)[message.offset : end] = chunk
            block.written = end
        if not message.last:
            if not frames:
                self._begin(block, message)
            return
        in_memory = block.foreign and block.written == 0
        if not in_memory and block.written != block.nbytes:
            raise ProtocolError(f"payload of {block.written} bytes, {block.nbytes} were granted")
        self.tally.add("payloads", block.landing if in_memory else "inline")

    def _begin(self, block: Block, message: wire.Payload) -> None:
        in_memory = block.foreign and block.written == 0
        if not in_memory and message.offset > block.written:
            raise ProtocolError("payload: bytes that have not come")
        self._ledger.begin(message)

    def _answer_held(self, now: float) -> None:
        """Answer those held offers again that may be answered otherwise.

        An offer of an unknown ticket, which any peer may send, costs a lookup a turn,
        until its ticket is announced or it was held for long enough.
        """
        ledger, stirred = self._ledger, self._ledger.take_stirred()
        if not self._held:
            return
        again = [
            held
            for held in self._unannounced.values()
            if now >= held.since + _HOLD_S or ledger.knows(held.unread.ticket)
        ]
        for handle in stirred & self._by_handle.keys():
            again += self._by_handle[handle].values()
        self._ask_again(now, sorted(again, key=lambda held: ledger.age(held.unread.ticket)))
        if ledger.news != self._seen_news:
            self._seen_news = ledger.news
            for ticket in ledger.turns():
                self._ask_again(now, [*self._by_handle.get(ticket, {}).values()])

    def _ask_again(self, now: float, offers: Iterable[_Held]) -> None:
        for held in sorted(offers, key=lambda one: one.stale):
            if self._held.get(held.name) is not held:
                continue  # two handles named it, or it had to make room
            if held.stale and self._is_taken_over(held.unread):
                continue  # a grant to it would be lost, or would take the other's away
            self._let_go(held)
            try:
                self._answer(held, now)
            except EpdError as error:
                self._drop(type(error).__name__, str(error))

    def _is_taken_over(self, unread: wire.UnreadOffer) -> bool:
        """Whether another encoder is to deliver an item, or waits to."""
        handle = unread.ticket, unread.item
        others = self._by_handle[handle].values()
        return self._ledger.is_granted(*handle) or not all(other.stale for other in others)

    def _answer(self, held: _Held, now: float) -> None:
        """Answer an offer, or hold it if it is to wait or its ticket may yet be announced."""
        if held.offer is None:
            if not self._ledger.knows(held.unread.ticket):
                if now >= held.since + _HOLD_S or not self._hold_unknown(held):
                    self._decline(held, wire.DECLINE_UNKNOWN)
                return
            try:
                held.offer = _read(held.unread)
            except ProtocolError:
                # Its encoder would wait for an answer until the request's deadline.
                self._decline(held, wire.DECLINE_UNREADABLE)
                raise
        landing = self._landing(held.offer)
        answer = self._ledger.offer(held.offer, now, landing=landing, peer=held.peer)
        if isinstance(answer, wire.Wait):
            if not held.waits:
                self.tally.add("waits")
                self._tell(held.peer, answer)
                held.waits = True
                # What readers have dropped since the last look may be room enough.
                self._next_housekeeping = now
            self._held[held.name] = held
            for handle in held.handles:
                self._by_handle[handle][held.name] = held
        elif isinstance(answer, wire.Decline):
            self._decline(held, answer.reason)
        elif not self._tell(held.peer, self._grant(answer, now)):
            # The grant was not sent: its block can be used by others at once.
            self._ledger.withdraw(wire.Withdraw(*answer.name))
        elif held.waits:
            self.tally.waited(now - held.since)

    def _decline(self, held: _Held, reason: str) -> None:
        self.tally.add("declines", reason)
        if held.waits:
            self.tally.waited(time.monotonic() - held.since)
        self._tell(held.peer, wire.Decline(held.unread.ticket, held.unread.item, reason))

    def _hold_unknown(self, held: _Held) -> bool:
        """Wait for the ticket of an offer to be announced, if there is room for it."""
        self._unknown[held.peer] += max(held.nbytes, _MIN_UNKNOWN_BYTES)
        self._held[held.name] = self._unannounced[held.name] = held
        if self._unknown.total() <= _MAX_UNKNOWN_BYTES:
            return True
        (most, _), *_ = self._unknown.most_common(1)
        mine = (one for one in self._unannounced.values() if one.peer == most)
        victim = held if most == held.peer else next(mine)
        self._let_go(victim)
        if victim is not held:
            self._decline(victim, wire.DECLINE_UNKNOWN)
        return victim is not held

    def _let_go(self, held: _Held) -> None:
        """Nothing happens if no such offer is held."""
        known = self._held.pop(held.name, None)
        if known is None:
            return
        if self._unannounced.pop(held.name, None) is None:
            for handle in known.handles:
                del self._by_handle[handle][held.name]
                if not self._by_handle[handle]:
                    del self._by_handle[handle]
        else:
            self._unknown[held.peer] -= max(known.nbytes, _MIN_UNKNOWN_BYTES)
            if not self._unknown[held.peer]:
                del self._unknown[held.peer]

    def _landing(self, offer: wire.Offer) -> str:
        """How an encoder is to deliver."""
        if self._engine is not None and offer.engine == self._engine.name:
            return "remote"
        return "shared" if host.shares_memory(offer.process) else "inline"

    def _grant(self, block: Block, now: float) -> wire.Grant:
        landing: wire.Landing = wire.Inline()
        if block.landing == "remote":
            assert self._engine is not None
            place = self._arena.machine_address + block.offset
            landing = wire.Remote(self._engine.session, place)
        elif block.landing == "shared":
            address, place = self._arena.address, self._arena.data_offset + block.offset
            landing = wire.Shared(address.path, address.size, address.seal, place)
        return wire.Grant(*block.name, block.until - now, landing)

    def _keep_house(self, now: float) -> None:
        self._next_housekeeping = now + (_WAITING_TICK_MS / 1e3 if self._held else _HOUSEKEEPING_S)
        self._reservations.reclaim(now)
        if now >= self._next_expiry:  # a look at all entries
            self._next_expiry = now + _HOUSEKEEPING_S
            self._ledger.expire(now)
        if now >= self._next_question:
            self._next_question = now + _ASK_S
            for block in self._reservations.quarantined:
                # One that no time is left of is only a question: an encoder that does not
                # know it, or not any more, withdraws it.
                assert block.peer is not None
                self._tell(block.peer, wire.Grant(*block.name, 0.0, wire.Inline()))
        reserved, waiting = self._reservations, self._ledger.waiting
        quarantined = len(reserved.quarantined)
        self.tally.held(reserved.held_bytes, waiting, quarantined, kept=reserved.kept_bytes)
        idle = self._last_payload is not None and now > self._last_payload + _IDLE_S
        if idle and not len(self._reservations):
            self._arena.give_back(self._reservations.extents.free_ranges)
            self._last_payload = None

    def _tell(self, encoder: bytes, message: wire.Message) -> bool:
        """Returns whether it was sent; it may be lost with the connection all the same."""
        try:
            self._send(self._payload, encoder, message)
        except zmq.Again:
            self._drop("peer_not_reading", type(message).__name__)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.tally.add("dropped", "unreachable")
        else:
            return True
        return False

    def _send(self, socket: zmq.Socket, peer: bytes, message: wire.Message) -> None:
        socket.send_multipart([peer, wire.encode_message(message)], zmq.NOBLOCK)
