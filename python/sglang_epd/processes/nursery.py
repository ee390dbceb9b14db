"""Children of a server for work that may go wrong: started in milliseconds, ended at once.

A server has threads, a model and users' data, and must not be forked. So one small
process forks for it (`forker`); it is started with the first child and, should it die,
again with the next one. The kernel ends it with the server, and its children with it.

Owns the processes. The messages to them are between a child and its user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.processes.forker import Bear, Born
from sglang_epd.processes.packets import pair, receive_now, send_now

logger = logging.getLogger(__name__)

# Modules take seconds to be imported, on a busy machine more; a fork takes milliseconds.
_FIRST_S = 60.0
_BIRTH_S = 5.0
_END_S = 5.0
# A broken channel is seen this much before the end of the process, at most.
_NOTICED_S = 1.0
# The kernel ends children while their forker ends.
_ORPHANED_S = 0.1
# Processes that serve users, or that end soon, come first on a busy machine. Beside three
# hostile videos a picture took 1.5 to 2 times as long at 5, and up to 1.2 times at 10.
_NICE = 10
_ENV = {
    # One heap for all threads: each more would claim 64 MiB of addresses, which count.
    "MALLOC_ARENA_MAX": "1",
    # Freed memory is kept for the next item, up to this: new pages were half of the time.
    "MALLOC_MMAP_THRESHOLD_": str(16 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_BORN = msgspec.msgpack.Decoder(Born)


@dataclass(frozen=True, eq=False)
class Child:
    """One process.

    Attributes:
        end: of a channel (`packets`), this side's.
        pid: for messages; signals go to `process`, which no other process can become.
        process: a descriptor that is readable when the child has ended.
        forker_ends: whether the process that forked it has ended, or does so within seconds.
    """

    end: socket.socket
    pid: int
    process: int
    forker_ends: Callable[[float], bool]

    @property
    def orphaned(self) -> bool:
        """Of one that has ended: whether it did because the process that forked it had."""
        return self.forker_ends(_ORPHANED_S)

    def kill(self) -> None:
        """End it now; from any thread. One that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it has ended, its memory is free and its descriptors are closed."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    def close(self) -> None:
        """Kill it and let go of it; neither descriptor may be used any more."""
        self.kill()
        self.end.close()
        os.close(self.process)


class Nursery:
    """Forks children; safe to use from any thread.

    Args:
        modules: imported once, before there is any child.
        birth_s: how long a fork may take.
    """

    def __init__(self, modules: Sequence[str] = (), *, birth_s: float = _BIRTH_S) -> None:
        self._modules = tuple(modules)
        self._birth_s = birth_s
        self._lock = threading.Lock()
        self._forker: _Forker | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that forks, if there is one now."""
        forker = self._forker
        return forker.pid if forker is not None and forker.alive else None

    def start(self) -> None:
        """Start the process that forks, if it is not there; does not wait for it."""
        self._current()

    def child(
        self, factory: str, options: dict[str, Any] | None = None, *, nice: int = _NICE
    ) -> Child:
        """A new child, which has begun. Blocks for milliseconds, the first time for longer.

        Args:
            factory: `module:function`, called in the child with its end of the channel
                and the options.
            nice: by how much it yields to other processes.

        Raises:
            UnavailableError: this machine cannot start processes, or the nursery is closed.
        """
        # Once more, in case that the process that forks was gone or stopped.
        for _ in range(2):
            forker = self._current()
            try:
                return forker.bear(Bear(factory, options or {}, nice), self._birth_s)
            except TimeoutError:
                if not forker.kill():  # and no other is started beside it
                    break
            except (EOFError, OSError, ProtocolError):
                # It could not fork, or this process has no descriptor left for the child's.
                if not forker.ends(_NOTICED_S):
                    break
        raise UnavailableError("a process for untrusted media cannot be started")

    def close(self) -> None:
        """End the process that forks, and its children with it."""
        with self._lock:
            self._closed = True
            if self._forker is not None:
                self._forker.kill()

    def _current(self) -> _Forker:
        with self._lock:
            if self._closed:
                raise UnavailableError("the nursery is closed")
            if self._forker is None or not self._forker.alive:
                self._forker = _Forker(self._modules)
            return self._forker


class _Forker:
    """The process that forks, as the server sees it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._end, theirs = pair()
        # Full only where the other end has been stopped.
        self._end.settimeout(_BIRTH_S)
        self._letting_go = threading.Lock()
        self._started = threading.Event()
        self._dead = threading.Event()
        self._warm = False
        self._failure: OSError | None = None
        # The kernel ends a process with the thread that started it: this one waits for it.
        threading.Thread(
            target=self._keep, args=(theirs, modules), name="epd-nursery", daemon=True
        ).start()
        self._started.wait()
        if self._failure is not None:
            raise UnavailableError(f"a process cannot be started: {self._failure.strerror}")

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def ends(self, within_s: float) -> bool:
        """Whether it has ended, or does so within seconds: its channel breaks a little before."""
        return self._dead.wait(within_s)

    def bear(self, told: Bear, birth_s: float) -> Child:
        """A new child.

        Raises:
            TimeoutError: there was none within a time in which there should be.
            EOFError, OSError: the process is gone, or could not fork.
            ProtocolError: the child's descriptor did not arrive.
        """
        end, theirs = pair()
        try:
            end.settimeout(birth_s if self._warm else max(birth_s, _FIRST_S))
            with theirs:
                send_now(self._end, told, [theirs.fileno()])
            born, fds = receive_now(end, _BORN)
        except BaseException:
            end.close()
            raise
        end.settimeout(None)
        self._warm = True
        return Child(end, born.pid, fds[0], self.ends)

    def kill(self) -> bool:
        """End it and its children: whether it has ended, which one that the kernel holds has not.

        Until it has, it is asked for children as before.
        """
        with self._letting_go:
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
        ended = self._dead.wait(_END_S)
        if not ended:
            logger.error("The process that forks others (pid %d) does not end", self.pid)
        return ended

    def _keep(self, theirs: socket.socket, modules: Sequence[str]) -> None:
        command = [sys.executable, "-P", "-m", "sglang_epd.processes.forker"]
        process = None
        try:
            with theirs:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid()), *modules],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **_ENV},
                )
            self._process = os.pidfd_open(process.pid)
        except OSError as error:
            if process is not None:  # the last descriptor was another thread's
                process.kill()
                process.wait()
            self._failure = error
            self._end.close()
            self._dead.set()
            self._started.set()
            return
        self.pid = process.pid
        self._started.set()
        process.wait()
        with self._letting_go:
            self._dead.set()
            self._end.close()
            os.close(self._process)
