"""Sockets to servers that nobody here trusts.

aiohttp parses all that one read has brought before the event loop goes on: 256 KiB of interim
answers (`HTTP/1.1 103`, 18 bytes) take a quarter of a second. Here a read brings little while
an answer is awaited, and only so many bytes are taken in before there is one. asyncio's own
event loop reads by these methods; uvloop does not.
"""

from __future__ import annotations

import socket
from typing import Any

# At a time: while an answer is awaited, and of a body.
_READ_BYTES = {False: 2 << 10, True: 64 << 10}
# A TLS handshake with a long chain of certificates, and headers.
_UNANSWERED_BYTES = 64 << 10


class GuardedSocket(socket.socket):
    """A stream socket whose reads are small.

    Attributes:
        answering: whether the answer's headers have come, and its body has not ended.
    """

    answering = False
    # Bytes since something was sent.
    _unanswered = 0

    def send(self, *data: Any) -> int:
        self._unanswered = 0
        return super().send(*data)

    def recv(self, size: int, *flags: Any) -> bytes:
        data = super().recv(min(size, _READ_BYTES[self.answering]), *flags)
        self._note(len(data))
        return data

    def recv_into(self, buffer: Any, *options: Any) -> int:
        count = super().recv_into(memoryview(buffer)[: _READ_BYTES[self.answering]], *options)
        self._note(count)
        return count

    def _note(self, count: int) -> None:
        if not self.answering:
            self._unanswered += count
            if self._unanswered > _UNANSWERED_BYTES:
                raise ConnectionAbortedError("too many bytes without an answer")
