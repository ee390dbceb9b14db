"""SGLang servers that start in seconds: forks of a process that has imported it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from integration import fork_server
from sglang_epd.cli.processes import ServerError, ServerProcess

# SGLang reads many of its variables while it is imported, so these alone may differ
# between the server and the process that it is a fork of.
_READ_LATE = (
    "SGLANG_EPD",
    "SGLANG_VLM_CACHE_SIZE_MB",
    "SGLANG_RADIX_FORCE_MISS",
    "SGLANG_PP_LAYER_PARTITION",
    fork_server.BREAKS,
    # Another one in each test.
    "PYTEST_CURRENT_TEST",
)
# A dozen processor seconds, beside others' starts.
_IMPORT_TIMEOUT_S = 400.0
_END_TIMEOUT_S = 10.0


class ForkServer:
    """The process that is forked, started when it is first needed.

    Args:
        env: added to this process's own for what servers read while they are imported.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._more = env or {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._statuses: dict[int, int] = {}

    def can_be(self, command: list[str], env: Mapping[str, str]) -> bool:
        """Whether a fork would be the server that this command starts in this environment."""
        ours = command[:3] == [sys.executable, "-m", fork_server.SERVER]
        return ours and _early(env) == _early({**os.environ, **self._more})

    def fork(self, arguments: list[str], env: Mapping[str, str], log: Path) -> Fork:
        """Start a server.

        Raises:
            ServerError: the process that is to be forked ended, or does not answer.
        """
        with self._lock:
            if self._process is None:
                self._start()
            request = {"arguments": arguments, "env": dict(env), "log": str(log)}
            with self._explained():
                self._control.sendall(json.dumps(request).encode() + b"\n")
                while True:
                    answer = json.loads(self._lines.readline())
                    if "status" not in answer:
                        return Fork(self, answer["pid"])
                    self._statuses[answer["pid"]] = answer["status"]

    def status(self, pid: int) -> int | None:
        """How a fork ended, as `waitpid` says it, or None while it runs.

        Raises:
            ServerError: the process that it is a fork of has ended, and it with that.
        """
        with self._lock, self._explained():
            while pid not in self._statuses and self._answered():
                answer = json.loads(self._lines.readline())
                self._statuses[answer["pid"]] = answer["status"]
            return self._statuses.get(pid)

    def close(self) -> None:
        """End the process, and with it what is left of its forks."""
        if self._process is None:
            return
        self._control.close()
        self._lines.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_IMPORT_TIMEOUT_S)
        # Unbuffered: what is there to be read is there to be seen.
        self._lines: BinaryIO = self._control.makefile("rb", buffering=0)  # type: ignore[assignment]
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, fork_server.__file__, str(number)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._more},
                pass_fds=[number],
            )

    def _answered(self) -> bool:
        self._control.settimeout(0)
        try:
            if not self._control.recv(1, socket.MSG_PEEK):
                raise EOFError("it has ended")
            return True
        except BlockingIOError:
            return False
        finally:
            self._control.settimeout(_IMPORT_TIMEOUT_S)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError, ValueError) as error:
            raise ServerError(f"the process that servers are forks of: {error!r}") from error


class Fork:
    """A forked process, with what `ServerProcess` asks of `subprocess.Popen`."""

    def __init__(self, parent: ForkServer, pid: int) -> None:
        self._parent = parent
        self.pid = pid

    def poll(self) -> int | None:
        status = self._parent.status(self.pid)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkedServer(ServerProcess):
    """A server that is a fork where that is no other than a start, and started where it is."""

    def __init__(self, parent: ForkServer, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._parent = parent

    def _begin(self) -> Any:
        env = os.environ if self._env is None else self._env
        if not self._parent.can_be(self.command, env):
            return super()._begin()
        return self._parent.fork(self.command[3:], env, self.log_path)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_READ_LATE)}
