"""Closes connections that send no request, or only the beginning of one.

Uvicorn bounds how long a connection may be idle after an answer, and nothing before: half
of a header would keep a connection, and its descriptor, for as long as its sender likes.
Leans on `uvicorn.protocols.http.auto.AutoHTTPProtocol`: its `cycle` is the last request.
Uvicorn answers bytes that are no request with 400, and logs a line each time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEAD_S = 20.0
_MALFORMED = "Invalid HTTP request received."
_LINE_EVERY_S = 60.0


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


class PromptHeads(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A server's side of one connection, which has to have sent a head in `_HEAD_S`."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(_HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
