"""The encoder's HTTP server: prompt heads of requests, and an end in good order.

Uvicorn bounds how long a connection may be idle after an answer, and nothing before: half
of a header would keep a connection, and its descriptor, for as long as its sender likes. So would
a long answer whose client stops reading. `PromptHeads` ends both kinds of connection. It is a
`uvicorn.protocols.http.h11_impl.H11Protocol`, because uvicorn's other parser bounds no head; the
protocol's `cycle` is the last request. On a signal `DrainingServer` finishes accepted requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_epd.encoder.registration import Registration
from sglang_epd.encoder.service import EncoderService
from sglang_epd.processes.forker import leave

logger = logging.getLogger(__name__)

# Together less than the 30 s that Kubernetes gives a process to stop.
DRAIN_S = 24
CLOSE_S = 3
# Then the process ends with whatever has not: a pass that hangs, say.
END_S = DRAIN_S + 8 * CLOSE_S
_HEAD_S = 20.0
_UNREAD_S = 60.0
_MALFORMED = "Invalid HTTP request received."
_LINE_EVERY_S = 60.0


class DrainingServer(uvicorn.Server):
    """Stops on a signal: refuses new requests, finishes accepted ones, and ends.

    Meanwhile it answers /health with 503, so that load balancers look elsewhere.
    After a second signal it waits no longer; told by SIGTERM, it ends in `END_S` whatever hangs.
    With a broken tower it stops as on a signal, with accepted items going elsewhere, and the
    process ends with status 1: its supervisor starts a new one.

    Args:
        registration: begins when the server listens, and ends with the signal.
    """

    def __init__(
        self, config: uvicorn.Config, service: EncoderService, registration: Registration
    ) -> None:
        super().__init__(config)
        self._service = service
        self._registration = registration
        self._broken = service.computations.broken
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._told = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_if_broken())
        try:
            await super().serve(sockets)
        finally:
            ending.cancel()
            await self._registration.leave()
            if self._limit is not None:
                self._limit.cancel()
        if self._broken.is_set():
            leave(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Not earlier: a language server asks a registered encoder at once. Not after a signal.
        if self.started and not self._told:
            self._registration.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told:
            super().handle_exit(sig, frame)
            return
        self._told = True

        def begin() -> None:
            self._draining = asyncio.create_task(self._drain(sig, frame))
            self._limit = self._loop.call_later(END_S, _give_up)

        self._loop.call_soon_threadsafe(begin)

    async def _drain(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        logger.info("Draining: %d requests in work", self._service.admission.live)
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._registration.leave()
                await self._service.wait_idle()
        except TimeoutError:
            logger.warning("%d requests given up", self._service.admission.live)
        if self._broken.is_set():
            self.should_exit = True  # a signal would be how it ends
        else:
            super().handle_exit(sig, frame)

    async def _end_if_broken(self) -> None:
        await self._broken.wait()
        logger.critical("This encoder ends, because its vision tower is broken")
        self.handle_exit(signal.SIGTERM, None)


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Have a server run until it has stopped.

    Uvicorn raises the signal that stopped it once more when all is done, and asyncio makes an
    exception of a Ctrl-C, which needs no message.
    """
    import uvloop

    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serving)


def _give_up() -> NoReturn:
    logger.critical("This encoder ends; something that it has begun has not ended in %d s", END_S)
    leave(1)


class SeldomMalformed(logging.Filter):
    """Of the lines about malformed requests, one a minute, with the count of the others."""

    _next = 0.0
    _others = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != _MALFORMED:
            return True
        now = time.monotonic()
        if now < self._next:
            self._others += 1
            return False
        record.msg = f"{_MALFORMED} {self._others} others were not logged."
        self._next, self._others = now + _LINE_EVERY_S, 0
        return True


class PromptHeads(H11Protocol):
    """A server's side of one connection, which has to have sent a head in `_HEAD_S`, and may
    leave more of an answer unread than is buffered for `_UNREAD_S`."""

    _waiting: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)

    def _wait(self) -> None:
        # Not closed: that would wait for an answer before to be read.
        self._waiting = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
