"""Sockets to untrusted servers.

aiohttp parses all that one read has brought before the event loop goes on: 256 KiB of interim
answers (`HTTP/1.1 103`, 18 bytes) take a quarter of a second. Here a read brings little while
an answer is awaited, and while a body in chunks is short, and only so many bytes are taken in
before there is an answer. asyncio's own event loop reads by these methods; uvloop does not.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# At a time: while an answer is awaited, and of a body.
_LEAST_BYTES = 2 << 10
_MOST_BYTES = 64 << 10
# The share of the body so far that one read of a chunked body may bring.
_GROWTH = 16
# A TLS handshake with a long chain of certificates, and headers.
_UNANSWERED_BYTES = 64 << 10


class GuardedSocket(socket.socket):
    """A stream socket whose reads are small."""

    _answering = False
    _most = _LEAST_BYTES
    # Bytes since something was sent.
    _unanswered = 0

    @contextmanager
    def answering(self, *, chunked: bool) -> Iterator[None]:
        """From when an answer's headers have come until its body has ended.

        Args:
            chunked: it comes in chunks of any size.
        """
        self._answering = True
        self._most = _LEAST_BYTES if chunked else _MOST_BYTES
        try:
            yield
        finally:
            self._answering = False
            self._most = _LEAST_BYTES

    def send(self, *data: Any) -> int:
        self._unanswered = 0
        return super().send(*data)

    def recv(self, size: int, *flags: Any) -> bytes:
        data = super().recv(min(size, self._most), *flags)
        self._note(len(data))
        return data

    def recv_into(self, buffer: Any, *options: Any) -> int:
        count = super().recv_into(memoryview(buffer)[: self._most], *options)
        self._note(count)
        return count

    def _note(self, count: int) -> None:
        if self._answering:
            self._most = min(self._most + count // _GROWTH, _MOST_BYTES)
            return
        self._unanswered += count
        if self._unanswered > _UNANSWERED_BYTES:
            raise ConnectionAbortedError("too many bytes without an answer")
