"""Server processes: started in their own session, waited for, and never left behind.

Tests, benchmarks and the demo start SGLang servers with this. It knows HTTP readiness
and process groups; which servers to start, and with which flags, is the caller's.

A server's scheduler, detokenizer and workers are its descendants in the same process
group, so a signal to the group reaches all of them. When this process dies without
having stopped a server, be it of `kill -9`, the kernel ends the server
(`PR_SET_PDEATHSIG`), and SGLang's own processes follow their parent in the same way.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_POLL_S = 0.1
# Time for a server's own children to end after the server.
_LEFTOVERS_S = 1.0
# Run in the child before it becomes the server: ask for a SIGKILL when the parent
# dies (1 is PR_SET_PDEATHSIG), unless it has died already. Not a `preexec_fn`, which may
# deadlock in a parent that has threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("parent is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error}")
"""
# Never through a proxy: the servers are on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# SGLang derives more ports from a server's own (233 and up, with data parallelism), so
# the range ends early. Each process begins elsewhere in it: two may run at a time.
_PORTS = range(17_500, 21_500)
_start = random.randrange(len(_PORTS))
_next_ports = itertools.cycle([*_PORTS[_start:], *_PORTS[:_start]])


class ServerError(RuntimeError):
    """A server died or did not become ready; the message ends with the tail of its log."""


def unproxied(env: Mapping[str, str]) -> dict[str, str]:
    """That environment for servers that ask each other on this machine, as SGLang's do through a
    proxy that is not told to be left out."""
    # The lower case counts where both are there, and "*", which is everything, only by itself.
    told = env.get("no_proxy") or env.get("NO_PROXY") or ""
    listed = told if told == "*" else ",".join(filter(None, (told, "127.0.0.1,localhost,::1")))
    return {**env, "no_proxy": listed, "NO_PROXY": listed}


def free_port() -> int:
    """A TCP port for a server that starts later, each only once in this process.

    Taken from a range that no other program draws from: Linux gives outgoing connections 32768
    and up, SGLang its process groups 22000 to 29999, Mooncake 12300 to 17000. A port of
    those may be gone by the time that a server of twenty seconds' start-up binds it.

    Raises:
        ServerError: no port of the range is free.
    """
    for _ in range(_PORTS.stop - _PORTS.start):
        port = next(_next_ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")


class ServerProcess:
    """One server as a child process, with everything that it starts in turn.

    Use it as a context manager: entering starts it, leaving always stops it.

    Args:
        command: the argument vector; its first element is looked up in PATH.
        log_path: file that takes its stdout and stderr, replaced at each start.
        ready_url: answers 200 to GET once the server takes requests.
        env: the whole environment; the parent's when None.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        ready_url: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self.ready_url = ready_url
        self._env = dict(env) if env is not None else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group and session."""
        if self._process is None:
            raise ServerError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server's first process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server; returns at once, see `wait_ready`.

        Linux sends the parent-death signal when the *thread* that forked ends, so call
        this from a thread that outlives the server (the main thread, as a rule).

        Raises:
            ServerError: it is running already.
        """
        if self.running:
            raise ServerError(f"{self.name} is running already (pid {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = self._begin()

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until `ready_url` answers 200; return the seconds that took.

        Args:
            timeout_s: after this long the wait is given up; the server keeps running.

        Raises:
            ServerError: the server ended first, or did not answer in time.
        """
        begin = time.monotonic()
        while True:
            elapsed = time.monotonic() - begin
            self.check_running()
            if answers_ok(self.ready_url, timeout_s=max(0.1, min(5.0, timeout_s - elapsed))):
                return time.monotonic() - begin
            if elapsed > timeout_s:
                raise ServerError(
                    f"{self.name} was not ready after {timeout_s:.0f} s.{self._tail_note()}"
                )
            time.sleep(_POLL_S)

    @property
    def end(self) -> str:
        """How the server has ended, or that it was not started; empty while it runs."""
        if self._process is None:
            return "was not started"
        code = self._process.poll()
        if code is None:
            return ""
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"

    def check_running(self) -> None:
        """Raise ServerError, with the tail of the log, when the server has ended."""
        if end := self.end:
            raise ServerError(f"{self.name} {end}.{self._tail_note()}")

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server and all of its descendants; does nothing when it has ended.

        The first process gets SIGTERM and ends its own in order (SGLang takes children
        that end by themselves for a crash, and waits five seconds to diagnose it). The
        group gets SIGKILL when the first process lives after `grace_s`, a second after it
        has ended, or at once when it had died before: orphans of a crash have no one to
        end them in order. An interrupt during the grace skips the rest of it.
        """
        if self._process is None:
            return
        group = self._process.pid
        if self._process.poll() is not None:
            grace_s = 0.0
        try:
            if grace_s > 0:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
                    self._wait_for_group(group, _LEFTOVERS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            self._process.wait()
            self._wait_for_group(group, 5.0)

    def kill(self) -> None:
        """SIGKILL the server and all of its descendants, as a crash would end them."""
        self.stop(grace_s=0.0)

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 400 * lines))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _begin(self) -> subprocess.Popen[bytes]:
        self.log_path.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:  # it may be truncated while the server writes
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())),
                    *self.command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def _tail_note(self) -> str:
        return f" The end of {self.log_path}:\n{self.tail()}"

    def _wait_for_group(self, group: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while _group_lives(group) and time.monotonic() < deadline:
            # Reaps the first process: while it is a zombie its group exists.
            assert self._process is not None
            self._process.poll()
            time.sleep(0.02)


def stop_all(servers: Sequence[ServerProcess], grace_s: float = 10.0) -> None:
    """Stop several servers at the same time, so that their graces do not add up."""
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        list(pool.map(lambda server: server.stop(grace_s), servers))


def answers_ok(url: str, timeout_s: float) -> bool:
    """Whether a GET of a URL on this machine is answered with 200 in time."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (OSError, http.client.HTTPException):
        return False


def _group_lives(group: int) -> bool:
    """Whether a process of the group runs. Zombies do not count: in a container whose
    first process reaps nobody, the orphans of a server stay zombies for ever."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (comm) state ppid pgrp ...; comm may hold spaces and brackets.
            state, _, pgrp, *_ = stat.read_text().rpartition(")")[2].split()
            if int(pgrp) == group and state not in "ZX":
                return True
    return False
