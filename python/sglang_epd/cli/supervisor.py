"""Runs a plan: starts its servers, follows their logs, restarts dead ones, stops all.

One loop in the calling thread, because the kernel ends servers with the thread that
started them. `lives` decides, `processes` acts, a `LineReporter` shows the events.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_epd.cli.console import LineReporter
from sglang_epd.cli.lives import Life, Restarts, State
from sglang_epd.cli.logs import FIRST_PHASE, LogFollower, phase_of
from sglang_epd.cli.processes import ServerError, ServerProcess, answers_ok, mapped_files
from sglang_epd.cli.topology import Fleet, Server

_TICK_S = 0.1
_CHECK_TIMEOUT_S = 5.0
# Between two health checks: until the first answer, and from then on.
_CHECK_SOON_S = 0.3
_CHECK_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Shared memory that SGLang's processes, which are killed in the end, leave behind: 16 KiB and
# more a server (`managers.load_snapshot.shm_path_for`).
_LEFT_BEHIND = "/dev/shm/sglang_loads_"


@dataclass
class Supervised:
    """One server in the supervisor's care."""

    server: Server
    process: ServerProcess
    life: Life
    log: LogFollower
    phase: str = FIRST_PHASE
    since: float = 0.0
    check: Future[bool] | None = None
    check_at: float = 0.0
    why: str = field(default="", repr=False)
    memory: set[Path] = field(default_factory=set)

    def note_memory(self) -> None:
        """Remember what it maps of the memory that it will leave behind."""
        if self.process.running:
            self.memory |= mapped_files(self.process.pid, _LEFT_BEHIND)

    def remove_memory(self) -> None:
        """Remove that, once all of its processes have ended."""
        while self.memory:
            self.memory.pop().unlink(missing_ok=True)


class Supervisor:
    """Owns the processes of one plan.

    Args:
        plan: the servers.
        folder: for their logs.
        reporter: shows the events.
        env: variables that every server inherits.
        restarts: how often a dead server is started again.
        changed: called whenever the answer of `describe` has changed.
        python: the interpreter that the servers run with.
        start_timeout_s: until all have to have been ready.
        grace_s: for a server to stop; encoders finish accepted requests.
    """

    def __init__(
        self,
        plan: Fleet,
        folder: Path,
        reporter: LineReporter,
        *,
        env: Mapping[str, str],
        restarts: Restarts,
        changed: Callable[[], None] = lambda: None,
        python: str = sys.executable,
        start_timeout_s: float = 1800.0,
        grace_s: float = 30.0,
    ) -> None:
        self._reporter = reporter
        self._changed = changed
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._told = 0
        self._began = time.monotonic()
        self._all_ready = False
        self._charges = {
            server.name: Supervised(
                server,
                ServerProcess(
                    server.name,
                    server.argv(python),
                    log_path=folder / f"{server.name}.log",
                    ready_url=f"{server.url}{server.ready_path}",
                    env={**env, **server.place.env},
                ),
                Life(restarts),
                LogFollower(folder / f"{server.name}.log"),
            )
            for server in plan.servers
        }

    def describe(self) -> list[dict[str, Any]]:
        """Each server: its role, place and state."""
        return [
            {
                "name": charge.server.name,
                "role": charge.server.role,
                "url": charge.server.url,
                "state": charge.life.state.value,
                "pid": charge.process.pid if charge.process.running else None,
                "restarts": charge.life.restarts,
                "place": charge.server.place.shown,
                "log": str(charge.process.log_path),
                "command": charge.server.line(),
            }
            for charge in self._charges.values()
        ]

    def run(self) -> None:
        """Start everything and keep it running until a signal tells this process to stop.

        Everything is stopped on every way out. A second signal kills
        the remaining processes at once.

        Raises:
            ServerError: a server did not start, or no server of a role is left.
        """
        with self._signals(), ThreadPoolExecutor(len(self._charges)) as checks:
            try:
                while not self._told:
                    for charge in self._charges.values():
                        self._look_after(charge, checks)
                    self._judge()
                    self._follow()
                    time.sleep(_TICK_S)
            finally:
                self._stop()

    def _look_after(self, charge: Supervised, checks: ThreadPoolExecutor) -> None:
        now, life = time.monotonic(), charge.life
        if life.due(now) and self._needs_are_met(charge):
            self._start(charge, now)
        elif life.running and not charge.process.running:
            self._bury(charge, now)
        elif life.running:
            self._check(charge, now, checks)

    def _needs_are_met(self, charge: Supervised) -> bool:
        needed = (self._charges[name] for name in charge.server.needs)
        return all(one.life.state is State.READY for one in needed)

    def _start(self, charge: Supervised, now: float) -> None:
        again = charge.life.state is State.DOWN
        if again:
            with contextlib.suppress(FileNotFoundError):
                # Its last words, while it starts anew.
                charge.process.log_path.replace(f"{charge.process.log_path}.previous")
        charge.process.start()
        charge.life.started()
        charge.phase, charge.since, charge.check = FIRST_PHASE, now, None
        word = f"restart {charge.life.restarts}" if again else "started"
        self._tell(charge, f"{word}, pid {charge.process.pid}")

    def _bury(self, charge: Supervised, now: float) -> None:
        for line in charge.log.finish():
            self._reporter.line(charge.server.name, line)
        try:
            charge.process.check_running()
        except ServerError as error:
            charge.why = str(error)
        # Its own children may be there still.
        charge.process.stop()
        charge.remove_memory()
        charge.life.ended(now)
        end = charge.why.partition("\n")[0].partition(". The end of")[0]
        end = end.removeprefix(f"{charge.server.name} ")
        if charge.life.state is State.DOWN:
            self._tell(charge, f"{end}; starts again in {charge.life.wait_s(now):.0f} s")
        else:
            self._tell(charge, f"{end}; given up")

    def _check(self, charge: Supervised, now: float, checks: ThreadPoolExecutor) -> None:
        if charge.check is None:
            if now >= charge.check_at:
                url = charge.process.ready_url
                charge.check = checks.submit(answers_ok, url, _CHECK_TIMEOUT_S)
            return
        if not charge.check.done():
            return
        ok, charge.check, before = charge.check.result(), None, charge.life.state
        charge.life.answered(ok)
        charge.check_at = now + (_CHECK_S if ok else _CHECK_SOON_S)
        if charge.life.state is not before:
            if before is State.STARTING:
                charge.note_memory()
            took = f" after {now - charge.since:.1f} s" if before is State.STARTING else ""
            self._tell(charge, f"{charge.life.state.value}{took}")

    def _judge(self) -> None:
        """End the run where it has no sense any more.

        Raises:
            ServerError: with the log of the server that is to blame.
        """
        for charge in self._charges.values():
            same = [one for one in self._charges.values() if one.server.role == charge.server.role]
            if charge.life.state is State.FAILED and (
                not self._all_ready or all(one.life.state is State.FAILED for one in same)
            ):
                raise ServerError(charge.why)
        waiting = {
            name: charge.phase if charge.life.state is State.STARTING else charge.life.state.value
            for name, charge in self._charges.items()
            if charge.life.state in (State.PENDING, State.STARTING, State.DOWN)
        }
        self._reporter.tick(waiting)
        if self._all_ready:
            return
        if not waiting:
            self._all_ready = True
            self._reporter.ready()
        elif time.monotonic() - self._began > self._start_timeout_s:
            late = ", ".join(f"{name} ({phase})" for name, phase in waiting.items())
            raise ServerError(f"not ready after {self._start_timeout_s:.0f} s (--timeout): {late}")

    def _follow(self) -> None:
        for name, charge in self._charges.items():
            for line in charge.log.lines():
                self._reporter.line(name, line)
                phase = phase_of(line)
                if phase and charge.life.state is State.STARTING and phase != charge.phase:
                    charge.phase = phase

    def _tell(self, charge: Supervised, text: str) -> None:
        self._reporter.news(charge.server.name, text)
        self._changed()

    def _stop(self) -> None:
        """Stop all servers: first the routers, which take users' requests, then all others.

        A reporter that raises does not keep one from being stopped.
        """
        told = self._told
        routers = [one for one in self._charges.values() if one.server.role == "router"]
        others = [one for one in self._charges.values() if one.server.role != "router"]
        try:
            self._stop_together(routers, told)
        finally:
            self._stop_together(others, told)

    def _stop_together(self, charges: list[Supervised], told: int) -> None:
        """End some servers at the same time.

        Args:
            told: the signals before; another one ends what has not ended yet at once.
        """
        for charge in charges:
            charge.note_memory()
        threads = [
            threading.Thread(target=charge.process.stop, args=(self._grace_s,))
            for charge in charges
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                if self._told > max(told, 1):
                    for charge in charges:
                        _kill(charge.process)
                self._follow()
                time.sleep(_TICK_S)
        finally:
            for thread, charge in zip(threads, charges, strict=True):
                thread.join()
                charge.remove_memory()
                charge.life.stopped()
        for charge in charges:
            for line in charge.log.finish():
                self._reporter.line(charge.server.name, line)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have this process told of signals, for as long as it has servers."""

        def tell(_number: int, _frame: FrameType | None) -> None:
            self._told += 1

        before = {number: signal.signal(number, tell) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill(process: ServerProcess) -> None:
    """End a server that another thread is stopping; that thread sees to the rest."""
    if process.running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
