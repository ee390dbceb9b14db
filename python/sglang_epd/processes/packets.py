"""Packets between processes of one server.

Each goes over a Unix socket pair, so nothing listens anywhere. Large data cross as
an anonymous file in memory whose descriptor travels with a packet: the bytes are written
once, and read or mapped once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from sglang_epd.errors import ProtocolError

# A packet may hold no more than the socket's send buffer, 208 KiB as a rule. A longer
# message (a long video's timestamps) travels as a file too.
_PACKET_BYTES = 64 << 10
_IN_A_FILE = b"\0"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ENCODER = msgspec.msgpack.Encoder()
# A send fails so while this process, or its machine, is short of something.
_SHORT = (errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def new_file(nbytes: int, name: str = "sglang-epd") -> int:
    """An anonymous file of zeros in memory, whose size is sealed; the caller closes the
    descriptor.

    Args:
        name: that /proc shows.

    Raises:
        OSError: no memory, or no descriptor left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A process that maps it may rely on its size: one that shrinks would end it by a signal.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_file(data: bytes | memoryview) -> int:
    """Such a file that holds `data`.

    Raises:
        OSError: no memory, or no descriptor left.
    """
    view = memoryview(data).cast("B")
    fd = new_file(len(view))
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_file(fd: int) -> bytes:
    """All of such a file, which is closed."""
    with os.fdopen(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0)
        while len(data) < size:  # a call reads 2 GiB at most
            data += os.pread(file.fileno(), size - len(data), len(data))
        return data


def send_now(end: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Send one message; descriptors stay the caller's.

    Raises:
        BlockingIOError: the socket does not block, and is full.
        OSError: the other end is gone.
    """
    _send_packet(end, _ENCODER.encode(message), fds)


def _send_packet(end: socket.socket, packet: bytes, fds: Sequence[int]) -> None:
    if len(packet) <= _PACKET_BYTES:
        socket.send_fds(end, [packet], fds)
        return
    fd = write_file(packet)
    try:
        socket.send_fds(end, [_IN_A_FILE], [fd, *fds])
    finally:
        os.close(fd)


def receive_now(end: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, list[int]]:
    """Receive one message and the descriptors that came with it, now the caller's.

    Raises:
        BlockingIOError: the socket does not block, and is empty.
        TimeoutError: nothing came within the socket's own timeout.
        EOFError: the other end is gone.
        ProtocolError: not a message.
    """
    try:
        packet, fds, flags, _ = socket.recv_fds(end, _PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError as error:
        raise EOFError("the other end is gone") from error
    if not packet:
        raise EOFError("the other end is gone")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise ProtocolError("a packet was cut short")
    if packet == _IN_A_FILE:
        packet = read_file(fds.pop(0))
    try:
        return decoder.decode(packet), fds
    except msgspec.MsgspecError as error:
        close_all(fds)
        raise ProtocolError(f"malformed message: {error}") from None


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Channel:
    """One end of a channel, on the running event loop.

    Args:
        end: taken over.
        decoder: of what the other end sends.
        received: called with each message and its descriptors, which it owns.
        ended: called once, with the reason, when nothing more will come: the other end
            is gone or said something that is no message. Not called after `close`.
    """

    def __init__(
        self,
        end: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        received: Callable[[Any, list[int]], None],
        ended: Callable[[str], None],
    ) -> None:
        self._end = end
        self._decoder = decoder
        self._received = received
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self.closed = False
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._readable)

    @property
    def unsent(self) -> int:
        """Messages that the other end has no room for yet."""
        return len(self._unsent)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send a message, or keep it until the other end has room; never blocks.

        The descriptors are taken over. After the channel's end it goes nowhere.

        Raises:
            TypeError, ValueError, OverflowError, RecursionError: it has something that no
                message can.
        """
        if self.closed:
            close_all(fds)
            return
        try:
            packet = _ENCODER.encode(message)
        except BaseException:
            close_all(fds)
            raise
        self._unsent.append((packet, list(fds)))
        if len(self._unsent) == 1:
            self._flush()

    def close(self) -> None:
        """Close this end; doing so again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._end.fileno())
        self._loop.remove_writer(self._end.fileno())
        self._end.close()
        while self._unsent:
            close_all(self._unsent.popleft()[1])

    def _flush(self) -> None:
        while self._unsent and not self.closed:
            packet, fds = self._unsent[0]
            try:
                _send_packet(self._end, packet, fds)
            except BlockingIOError:
                self._loop.add_writer(self._end.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno in _SHORT:
                    # Descriptors on their way are counted against this user's limit, too.
                    self._loop.remove_writer(self._end.fileno())
                    self._loop.call_later(0.01, self._flush)
                    return
                self._end_with(f"the other end is gone ({os.strerror(error.errno or 0)})")
                return
            self._unsent.popleft()
            close_all(fds)
        if not self.closed:
            self._loop.remove_writer(self._end.fileno())

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Some, not all: the loop has other work.
            for _ in range(64):
                if self.closed:
                    return
                try:
                    message, fds = receive_now(self._end, self._decoder)
                except EOFError as error:
                    self._end_with(str(error))
                    return
                except ProtocolError as error:
                    self._end_with(error.message)
                    return
                self._received(message, fds)

    def _end_with(self, reason: str) -> None:
        self.close()
        self._ended(reason)
