"""A network between encoders and a receiver that cuts, freezes and delays.

It forwards TCP and reads ZMTP's frames on the way, so that it can cut at a kind of message.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter

_GREETING_BYTES = 64
_LONG, _COMMAND = 0x02, 0x04
_KIND = re.compile(rb"\xa1t[\xa0-\xbf]([a-z]+)")
# A connection that ends so is reset: what was not read of it is gone.
_RESET = struct.pack("ii", 1, 0)
_Pair = tuple[socket.socket, socket.socket]


class _Frames:
    """Kinds of the messages in one direction of a connection, as they come to an end."""

    def __init__(self) -> None:
        self._skip = _GREETING_BYTES
        self._buffer = b""

    def feed(self, data: bytes) -> list[str]:
        kinds: list[str] = []
        self._buffer += data
        while True:
            if self._skip:
                skipped = min(self._skip, len(self._buffer))
                self._buffer, self._skip = self._buffer[skipped:], self._skip - skipped
            head = 9 if self._buffer and self._buffer[0] & _LONG else 2
            if self._skip or len(self._buffer) < head:
                return kinds
            flags, size = self._buffer[0], int.from_bytes(self._buffer[1:head], "big")
            if flags & _COMMAND or size > 4096:
                self._skip = head + size
                continue
            if len(self._buffer) < head + size:
                return kinds
            body, self._buffer = self._buffer[head : head + size], self._buffer[head + size :]
            if body.startswith(b"EPD") and (kind := _KIND.search(body)):
                kinds.append(kind.group(1).decode())


def _end(pair: _Pair) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Wakes the threads that read it or write to it.
            one.shutdown(socket.SHUT_RDWR)
        one.close()


class Link:
    """Listens on a port of its own and forwards to `endpoint`.

    Attributes:
        seen: messages that came through, or were cut, by kind.
        delay_s: how long every piece is kept back.
    """

    def __init__(self, endpoint: str) -> None:
        self.seen: Counter[str] = Counter()
        self.cuts = 0
        self.delay_s = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._stranded: set[_Pair] = set()
        self._bytes_left: int | None = None
        self._kinds: dict[str, bool] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.lead_to(endpoint)
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def lead_to(self, endpoint: str) -> None:
        """Forward to another receiver from now on."""
        secret, _, place = endpoint.removeprefix("tcp://").rpartition("@")
        host, _, port = place.rpartition(":")
        self._target = host, int(port)
        here = "{}:{}".format(*self._listener.getsockname())
        self.endpoint = f"tcp://{secret}@{here}" if secret else f"tcp://{here}"

    def cut(self, *, last: bool = False) -> None:
        """Reset every connection.

        Args:
            last: a message that it was to be cut at was its connection's last one, perhaps because
                an end has closed it in the same moment.
        """
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            self.cuts += last or bool(pairs)
        for pair in pairs:
            _end(pair)

    def strand(self) -> None:
        """Forward nothing on the connections that there are, not even their end."""
        with self._lock:
            self._stranded |= self._pairs

    def cut_in(self, nbytes: int) -> None:
        """Cut when so many more bytes have come through."""
        self._bytes_left = nbytes

    def cut_at(self, kind: str, *, after: bool) -> None:
        """Cut once, at the next message of a kind: before it arrives, or after."""
        self._kinds[kind] = after

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        """Let everything through, and forget what was to be cut."""
        self._bytes_left = None
        self._kinds.clear()
        self.delay_s = 0.0
        self._flowing.set()

    def close(self) -> None:
        self._listener.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.add((near, far))
            for source, sink in ((near, far), (far, near)):
                pump = threading.Thread(target=self._pump, args=(source, sink, (near, far)))
                pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, pair: _Pair) -> None:
        frames = _Frames()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay_s)
                self._flowing.wait()
                if pair in self._stranded:
                    continue
                through, cut = self._through(frames, data)
                try:
                    sink.sendall(data[:through])
                finally:
                    if cut:
                        self.cut(last=True)
        # What one end has closed is reset at the other.
        with self._lock:
            known = pair in self._pairs - self._stranded
            if known:
                self._pairs.discard(pair)
        if known:
            _end(pair)

    def _through(self, frames: _Frames, data: bytes) -> tuple[int, bool]:
        """How much of it comes through, and whether it is the last."""
        kinds = frames.feed(data)
        self.seen.update(kinds)
        for kind in kinds:
            if kind in self._kinds:
                return (len(data) if self._kinds.pop(kind) else len(data) // 3), True
        if self._bytes_left is not None:
            if self._bytes_left <= len(data):
                through, self._bytes_left = self._bytes_left, None
                return through, True
            self._bytes_left -= len(data)
        return len(data), False
