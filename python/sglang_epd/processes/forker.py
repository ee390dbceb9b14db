"""A small process with one thread, which forks children for a server (`nursery`).

Started as `python -m sglang_epd.processes.forker FD FRONT MODULE...`: FD is its end of
the channel, FRONT the server's process id, and the modules that children need are
imported here, once. A child begins within milliseconds, and shares the imports
with the others. Nothing of a user is ever read in this process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from sglang_epd.processes.packets import receive_now, send_now

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def depend_on(parent: int) -> None:
    """End when the parent does, for any reason, and not by signals of its terminal.

    The kernel sends SIGKILL when the parent's thread that started this process ends.
    SIGINT and SIGTERM, which reach a whole process group, are the parent's to answer.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that this one works for is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def gain_nothing() -> None:
    """No program that this process, or a child of it, may start has more rights than it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


class Bear(msgspec.Struct, frozen=True, tag="bear"):
    """Server: fork a child; its end of a channel comes with this.

    Attributes:
        factory: `module:function`, called in the child with its end and the options.
            The child ends when it returns.
        nice: by how much it yields to other processes.
    """

    factory: str
    options: dict[str, Any]
    nice: int


class Born(msgspec.Struct, frozen=True, tag="born"):
    """First on a child's channel: it lives; a descriptor of the process comes with this."""

    pid: int


_BEAR = msgspec.msgpack.Decoder(Bear)


class _Forker:
    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._pid = os.getpid()
        self._children: dict[int, int] = {}  # process ids by descriptor
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def serve(self) -> None:
        """Fork and reap until the server is gone."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._poll.unregister(fd)
                    os.waitpid(self._children.pop(fd), 0)
                    os.close(fd)
                    continue
                try:
                    told, fds = receive_now(self._end, _BEAR)
                except EOFError:
                    return
                with socket.socket(fileno=fds[0]) as end:
                    self._fork(told, end)

    def _fork(self, told: Bear, end: socket.socket) -> None:
        told_of, telling = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the server sees the channel end
            traceback.print_exc()
            os.close(told_of)
            os.close(telling)
            return
        if not pid:
            os.close(telling)
            os.read(told_of, 1)  # ends when the server was told: a child does not speak before
            os.close(told_of)
            self._live(told, end)
        os.close(told_of)
        # The process is there until it is waited for, so the descriptor is that child's.
        fd = os.pidfd_open(pid)
        self._children[fd] = pid
        self._poll.register(fd, select.POLLIN)
        # An item that is no longer wanted: the child sees the end of its channel.
        with suppress(OSError):
            send_now(end, Born(pid), [fd])
        os.close(telling)

    def _live(self, told: Bear, end: socket.socket) -> NoReturn:
        """In the child."""
        status = 1
        try:
            depend_on(self._pid)
            os.nice(told.nice)  # only here: modules are imported once, and a user waits for it
            for fd in (self._end.detach(), *self._children):
                os.close(fd)
            pkgutil.resolve_name(told.factory)(end, told.options)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            leave(status)


def leave(status: int) -> NoReturn:
    """End this process at once: threads that are stuck would be waited for."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    fd, front, *modules = sys.argv[1:]
    depend_on(int(front))
    gain_nothing()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(int(fd), False)
    for module in modules:
        importlib.import_module(module)
    # A child's collections of garbage would write to the pages of all that was imported.
    gc.collect()
    gc.freeze()
    _Forker(socket.socket(fileno=int(fd))).serve()


if __name__ == "__main__":
    main()
