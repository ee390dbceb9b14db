"""The clients of the receiver's control channel: the tokenizer's (`Control`), a scheduler's
(`Claims`).

The receiver may run in the client's process or in another of the same server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from sglang_epd.errors import EncodeError, EpdError, ProtocolError, UnavailableError
from sglang_epd.transfer.arena import Arena, ReceivedItem
from sglang_epd.wire import messages as wire

logger = logging.getLogger(__name__)

# The receiver ends a request at its deadline. This long after it, it must be dead.
GRACE_S = 30.0
# The tokenizer, where it is the reader of items (the backend zmq_to_tokenizer).
_READER = 0
# Contexts of this process's receivers, by the path of their control channel: between threads of
# one process a message takes no socket of the system and wakes no thread of libzmq.
receivers_here: weakref.WeakValueDictionary[Path, zmq.Context[Any]] = weakref.WeakValueDictionary()

_Socket = TypeVar("_Socket", bound=zmq.Socket[Any])


def _dial(context: zmq.Context[_Socket], address: str, option: int, value: int | bytes) -> _Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(option, value)
    socket.connect(address)
    return socket


class Control:
    """Announces requests to the receiver, and cancels them.

    Messages are queued by ZMQ and never block the caller. Use it from one event loop.
    """

    def __init__(self, control_path: Path) -> None:
        # By this the receiver finds the way back; a server may have several tokenizers.
        self.name = secrets.token_hex(8)
        self._context = zmq.asyncio.Context()
        address = f"ipc://{control_path}"
        self._socket = _dial(self._context, address, zmq.IDENTITY, self.name.encode())
        self._reader: asyncio.Task[None] | None = None
        self._welcome: asyncio.Future[wire.Welcome] | None = None
        self._claims: dict[str, asyncio.Future[wire.Settled]] = {}
        self._needed: dict[str, asyncio.Queue[wire.Needed]] = {}
        self._names = itertools.count()
        self._arena: Arena | None = None
        self._send_again: Callable[[str, wire.Expect], Awaitable[None]] | None = None
        # Those in work: media may have to be read first, and other messages do not wait for it.
        self._agains: set[asyncio.Task[None]] = set()

    def listen(self, send_again: Callable[[str, wire.Expect], Awaitable[None]]) -> None:
        """Have one party told of requests whose items are needed once more.

        Args:
            send_again: is called with a request's id and a new announcement of its items;
                raises an EpdError where they cannot be sent for.
        """
        assert self._send_again is None, "another party is told"
        self._send_again = send_again

    async def endpoint(self, timeout_s: float) -> str:
        """Where encoders reach the receiver; asked once, then remembered.

        Args:
            timeout_s: to wait for its answer, the first time.

        Raises:
            UnavailableError: the receiver did not answer in time.
        """
        return (await self._welcomed(timeout_s)).endpoint

    async def arena(self, timeout_s: float) -> Arena:
        """The memory that payloads land in; mapped once.

        Args:
            timeout_s: to wait for its answer, the first time.

        Raises:
            UnavailableError: the receiver did not answer in time.
        """
        welcome = await self._welcomed(timeout_s)
        if self._arena is None:
            self._arena = Arena.of(welcome)
        return self._arena

    @contextmanager
    def watched(self, ticket: str) -> Iterator[asyncio.Queue[wire.Needed]]:
        """The receiver's answers about a ticket, from before it is announced."""
        news = self._needed[ticket] = asyncio.Queue()
        try:
            yield news
        finally:
            del self._needed[ticket]

    async def expect(self, message: wire.Expect) -> None:
        """Announce a request before any encoder is asked for its items.

        Raises:
            UnavailableError: the receiver reads nothing any more.
        """
        await self._send(message)

    async def claim(self, expect: wire.Expect) -> wire.Settled:
        """Wait for a ticket's items, to be read by this process.

        Items that come after the call has ended are given back.

        Raises:
            UnavailableError: the receiver reads nothing any more, or says nothing, long after
                the request's deadline.
        """
        await self.arena(expect.ttl_s)
        claim = str(next(self._names))
        outcome: asyncio.Future[wire.Settled] = asyncio.get_running_loop().create_future()
        self._claims[claim] = outcome
        try:
            async with asyncio.timeout(expect.ttl_s + GRACE_S):
                await self._send(wire.Claim(claim, expect, _READER, 1))
                return await outcome
        except TimeoutError:
            await self._leave(claim, outcome)
            raise UnavailableError("this server's receiver does not answer") from None
        except UnavailableError:
            del self._claims[claim]  # it was not claimed
            raise
        except asyncio.CancelledError:
            await self._leave(claim, outcome)
            raise

    async def collect(self, expect: wire.Expect) -> list[ReceivedItem]:
        """Wait for a ticket's items, and read them where they landed.

        Raises:
            EpdError: the claim failed; this is its error.
        """
        arena = await self.arena(expect.ttl_s)
        settled = await self.claim(expect)
        # No await from here on: a cancellation would leave the items without an owner.
        return arena.receive(settled, _READER)

    async def _leave(self, claim: str, outcome: asyncio.Future[wire.Settled]) -> None:
        """Give a claim up after its caller has left."""
        if outcome.done() and not outcome.cancelled():
            # Its items came in this very moment.
            self._give_back(outcome.result())
        else:
            outcome.cancel()
            await self._tell(wire.Abandon(claim))

    async def fail(self, ticket: str, error: EpdError) -> None:
        """End a request that no encoder could serve."""
        await self._tell(wire.Fail(ticket, error.code, error.message))

    async def cancel(self, ticket: str) -> None:
        """End a request whose client went away."""
        await self._tell(wire.Cancel(ticket))

    def close(self) -> None:
        """Close the socket, and the mapping of the arena once no item is read from it."""
        if self._reader is not None:
            self._reader.cancel()
        for task in self._agains:
            task.cancel()
        self._context.destroy(linger=0)
        self._arena = None

    async def _welcomed(self, timeout_s: float) -> wire.Welcome:
        self._start_reading()
        if self._welcome is None:
            self._welcome = asyncio.get_running_loop().create_future()
        if self._welcome.done():
            return self._welcome.result()
        # Each caller asks: the first Hello may have come too early.
        await self._send(wire.Hello())
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._welcome), timeout_s)
        raise UnavailableError(f"this server's receiver did not answer within {timeout_s:g} s")

    def _start_reading(self) -> None:
        if self._reader is None:
            # Not in the context of the request that comes first: it has the request's media.
            self._reader = asyncio.get_running_loop().create_task(
                self._read(), name="read the receiver", context=Context()
            )

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                message = wire.decode_message(frame, wire.MAX_CONTROL_BYTES)
                if isinstance(message, wire.Welcome):
                    if self._welcome is not None and not self._welcome.done():
                        self._welcome.set_result(message)
                elif isinstance(message, wire.Settled):
                    self._on_settled(message)
                elif isinstance(message, wire.Needed):
                    # Of a request that has ended here nothing is needed.
                    if message.ticket in self._needed:
                        self._needed[message.ticket].put_nowait(message)
                elif isinstance(message, wire.Again):
                    task = asyncio.create_task(self._again(message), name=f"again {message.rid}")
                    self._agains.add(task)
                    task.add_done_callback(self._agains.discard)
                else:
                    raise ProtocolError(f"{type(message).__name__} from the receiver")
            except ProtocolError as error:
                logger.warning("Dropped a message of the receiver: %s", error)
            except Exception:
                # The next message must still be read: all requests wait for it.
                logger.exception("Could not handle a message of the receiver")

    async def _again(self, message: wire.Again) -> None:
        try:
            if self._send_again is None:
                raise EncodeError("this process sends for no media again")
            await self._send_again(message.rid, message.expect)
        except EpdError as error:
            await self.fail(message.expect.ticket, error)
        except Exception:
            logger.exception("Could not send for the media of %s again", message.rid)
            unknown = EncodeError("the request's media could not be sent for again")
            await self.fail(message.expect.ticket, unknown)

    def _on_settled(self, message: wire.Settled) -> None:
        if message.claim not in self._claims:
            raise ProtocolError(f"an outcome of {message.claim!r}, which was not claimed")
        outcome = self._claims.pop(message.claim)
        if outcome.done():
            self._give_back(message)
        else:
            outcome.set_result(message)

    def _give_back(self, message: wire.Settled) -> None:
        assert self._arena is not None
        for item in message.items:
            if item is not None:
                self._arena.drop(item.slot, _READER)

    async def _tell(self, message: wire.Fail | wire.Cancel | wire.Abandon) -> None:
        try:
            await self._send(message)
        except UnavailableError as error:
            # Without it the request ends too, at its deadline.
            logger.warning("%s is not told: %s", type(message).__name__, error)

    async def _send(self, message: wire.Message) -> None:
        try:
            await self._socket.send(wire.encode_message(message), zmq.NOBLOCK)
        except zmq.Again:
            raise UnavailableError("this server's receiver does not read") from None


class Claims:
    """Claims tickets at this server's receiver, and never blocks. Use it from one thread.

    Args:
        control_path: Unix socket of the control channel.
        first_reader, readers: the processes that read the claimed items.

    Attributes:
        socket: readable when something has settled.
    """

    def __init__(self, control_path: Path, first_reader: int = 0, readers: int = 1) -> None:
        here = receivers_here.get(control_path)
        context = here or zmq.Context()
        self._own_context = None if here else context
        address = f"{'inproc' if here else 'ipc'}://{control_path}"
        self.socket = _dial(context, address, zmq.SNDHWM, 0)
        self._first_reader = first_reader
        self._readers = readers

    def connect(self, timeout_s: float) -> Arena:
        """Map the receiver's arena.

        Raises:
            UnavailableError: no receiver answered in time.
        """
        self._send(wire.Hello())
        if not self.socket.poll(int(timeout_s * 1e3)):
            raise UnavailableError(f"this server's receiver did not answer within {timeout_s:g} s")
        reply = wire.decode_message(self.socket.recv())
        if not isinstance(reply, wire.Welcome):
            raise ProtocolError(f"expected Welcome, got {type(reply).__name__}")
        return Arena.of(reply)

    def claim(
        self,
        claim: str,
        expect: wire.Expect,
        covered: tuple[int, ...] = (),
        *,
        prefix: bool = False,
        early: bool = False,
    ) -> None:
        """Ask for a ticket's items; `take` will return the outcome under this name.

        Args:
            covered: items that are not needed; they come as None.
            prefix: whether layouts come first, where the prefix cache may have the items.
            early: whether `take` returns word of each item that lands before others.
        """
        readers = self._first_reader, self._readers
        self._send(wire.Claim(claim, expect, *readers, covered, prefix, early))

    def take_part(
        self, ticket: str, claim: str, name: str, items: tuple[int, ...], begun: int = -1
    ) -> None:
        """Ask for some items of a claim, all of which have landed; `take` will return them
        under `name`, with None for the others.

        Args:
            begun: one of the items, whose first rows will do.
        """
        self._send(wire.TakePart(ticket, claim, name, items, begun))

    def again(self, rid: str, expect: wire.Expect) -> None:
        """Have the tokenizer send for items of a request that it had sent for before."""
        self._send(wire.Again(rid, expect))

    def abandon(self, claim: str) -> None:
        """The items are not wanted any more; their outcome comes all the same."""
        self._send(wire.Abandon(claim))

    def take(self) -> list[wire.Settled | wire.AskPrefix | wire.Arrived]:
        """The outcomes of claims, and word of items, since the last call; never blocks."""
        settled: list[wire.Settled | wire.AskPrefix | wire.Arrived] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return settled
            message = wire.decode_message(frame, wire.MAX_CONTROL_BYTES)
            if not isinstance(message, wire.Settled | wire.AskPrefix | wire.Arrived):
                raise ProtocolError(f"{type(message).__name__} from the receiver")
            settled.append(message)

    def close(self) -> None:
        self.socket.close()
        if self._own_context is not None:
            self._own_context.destroy(linger=0)

    def _send(self, message: wire.Message) -> None:
        self.socket.send(wire.encode_message(message), zmq.NOBLOCK)
