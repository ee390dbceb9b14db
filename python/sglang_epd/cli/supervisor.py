"""Runs a plan: starts its servers, follows their logs, restarts dead ones, stops all.

One loop in the calling thread, because the kernel ends servers with the thread that
started them. `lives` decides, `processes` acts, a `LineReporter` shows the events.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_epd.cli.console import LineReporter
from sglang_epd.cli.lives import Life, Restarts, State
from sglang_epd.cli.logs import FIRST_PHASE, LogFollower, phase_of
from sglang_epd.cli.processes import ServerError, ServerProcess, answers_ok
from sglang_epd.cli.topology import Fleet, Server

_TICK_S = 0.1
_CHECK_TIMEOUT_S = 5.0
# Between two health checks: until the first answer, and from then on.
_CHECK_SOON_S = 0.3
_CHECK_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    why: str = ""


class Supervisor:
    """Owns the processes of one plan.

    Args:
        folder: for the servers' logs.
        env: variables that every server inherits.
        changed: called whenever the answer of `describe` has changed; may raise OSError.
        ready: called once, when all servers have been ready.
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
        changed: Callable[[], None],
        ready: Callable[[], None],
        start_timeout_s: float,
        grace_s: float = 30.0,
    ) -> None:
        self._reporter = reporter
        self._changed = changed
        self._ready = ready
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._told = 0
        self._began = time.monotonic()
        self._all_ready = False
        self._charges = [
            Supervised(
                server,
                ServerProcess(
                    server.name,
                    server.argv(sys.executable),
                    log_path=folder / f"{server.name}.log",
                    ready_url=f"{server.url}{server.ready_path}",
                    env={**env, **server.place.env},
                ),
                Life(restarts),
                LogFollower(folder / f"{server.name}.log"),
            )
            for server in plan.servers
        ]

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
            for charge in self._charges
        ]

    def run(self) -> None:
        """Start everything and keep it running until a signal tells this process to stop.

        Everything is stopped on every way out. A second signal kills
        the remaining processes at once.

        Raises:
            ServerError: a server did not start, or no server of a role is left.
        """
        # A check and the end of each.
        with self._signals(), ThreadPoolExecutor(2 * len(self._charges)) as threads:
            try:
                while not self._told:
                    for charge in self._charges:
                        self._look_after(charge, threads)
                    self._judge()
                    self._follow()
                    time.sleep(_TICK_S)
            finally:
                self._stop(threads)

    def _look_after(self, charge: Supervised, threads: ThreadPoolExecutor) -> None:
        now, life = time.monotonic(), charge.life
        if life.due(now) and self._has_its_needs(charge):
            self._start(charge, now)
        elif life.running and not charge.process.running:
            self._bury(charge, now)
        elif life.running:
            self._check(charge, now, threads)

    def _has_its_needs(self, charge: Supervised) -> bool:
        needed = [one for one in self._charges if one.server.name in charge.server.needs]
        if charge.life.state is State.DOWN:
            # What was given up does not come, and others of its role serve.
            needed = [one for one in needed if one.life.state is not State.FAILED]
        return all(one.life.state is State.READY for one in needed)

    def _start(self, charge: Supervised, now: float) -> None:
        again = charge.life.state is State.DOWN
        charge.life.started()
        charge.phase, charge.since, charge.check = FIRST_PHASE, now, None
        try:
            if again:
                with contextlib.suppress(FileNotFoundError):
                    # Its last words, while it starts anew.
                    charge.process.log_path.replace(f"{charge.process.log_path}.previous")
            charge.process.start()
        except OSError as error:  # a full disk, or no memory for a process
            charge.why = f"{charge.server.name} cannot be started: {error}"
            self._ended(charge, now, f"cannot be started ({error})")
            return
        word = f"restart {charge.life.restarts}" if again else "started"
        self._tell(charge, f"{word}, pid {charge.process.pid}")

    def _bury(self, charge: Supervised, now: float) -> None:
        self._finish_log(charge)
        end = charge.process.end
        try:
            charge.process.check_running()
        except ServerError as error:
            charge.why = str(error)
        # Its own children may be there still.
        charge.process.stop()
        self._ended(charge, now, end)

    def _ended(self, charge: Supervised, now: float, end: str) -> None:
        charge.life.ended(now)
        if charge.life.state is State.DOWN:
            self._tell(charge, f"{end}; starts again in {charge.life.wait_s(now):.0f} s")
        else:
            self._tell(charge, f"{end}; given up")

    def _check(self, charge: Supervised, now: float, threads: ThreadPoolExecutor) -> None:
        if charge.check is None:
            if now >= charge.check_at:
                url = charge.process.ready_url
                charge.check = threads.submit(answers_ok, url, _CHECK_TIMEOUT_S)
            return
        if not charge.check.done():
            return
        ok, charge.check, before = charge.check.result(), None, charge.life.state
        charge.life.answered(ok)
        charge.check_at = now + (_CHECK_S if ok else _CHECK_SOON_S)
        if charge.life.state is not before:
            took = f" after {now - charge.since:.1f} s" if before is State.STARTING else ""
            self._tell(charge, f"{charge.life.state.value}{took}")

    def _judge(self) -> None:
        """End the run where it has no sense any more.

        Raises:
            ServerError: with the log of the server that is to blame.
        """
        alive = {one.server.role for one in self._charges if one.life.state is not State.FAILED}
        for charge in self._charges:
            if charge.life.state is State.FAILED and not (
                self._all_ready and charge.server.role in alive
            ):
                raise ServerError(charge.why)
        waiting = {
            one.server.name: one.phase if one.life.state is State.STARTING else one.life.state.value
            for one in self._charges
            if one.life.state in (State.PENDING, State.STARTING, State.DOWN)
        }
        self._reporter.tick(waiting)
        if self._all_ready:
            return
        if not waiting:
            self._all_ready = True
            self._ready()
        elif time.monotonic() - self._began > self._start_timeout_s:
            late = ", ".join(f"{name} ({phase})" for name, phase in waiting.items())
            raise ServerError(f"not ready after {self._start_timeout_s:.0f} s (--timeout): {late}")

    def _follow(self) -> None:
        for charge in self._charges:
            if not charge.life.running:
                continue  # its log has been read to the end, and the next one is another file
            for line in charge.log.lines():
                self._reporter.line(charge.server.name, line)
                if charge.life.state is State.STARTING:
                    charge.phase = phase_of(line) or charge.phase
            charge.log.shorten()

    def _finish_log(self, charge: Supervised) -> None:
        for line in charge.log.finish():
            self._reporter.line(charge.server.name, line)

    def _tell(self, charge: Supervised, text: str) -> None:
        self._reporter.news(charge.server.name, text)
        try:
            self._changed()
        except OSError as error:
            self._reporter.news(charge.server.name, f"`status` does not show this: {error}")

    def _stop(self, threads: ThreadPoolExecutor) -> None:
        """Stop all servers: first the routers, which take users' requests, then all others.

        A reporter that raises does not keep one from being stopped.
        """
        told = self._told
        routers = [one for one in self._charges if one.server.role == "router"]
        try:
            self._stop_together(routers, threads, told)
        finally:
            others = [one for one in self._charges if one not in routers]
            self._stop_together(others, threads, told)

    def _stop_together(
        self, charges: Sequence[Supervised], threads: ThreadPoolExecutor, told: int
    ) -> None:
        """End some servers at the same time.

        Args:
            told: the signals before; another one ends what has not ended yet at once.
        """
        ends = [threads.submit(charge.process.stop, self._grace_s) for charge in charges]
        try:
            while not all(end.done() for end in ends):
                if self._told > max(told, 1):
                    for charge in charges:
                        _kill(charge.process)
                self._follow()
                time.sleep(_TICK_S)
        finally:
            for end, charge in zip(ends, charges, strict=True):
                end.result()
                charge.life.stopped()
        for charge in charges:
            self._finish_log(charge)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have this process told of signals, for as long as it has servers."""

        def tell(number: int, _frame: FrameType | None) -> None:
            # A terminal that closes sends it twice, by its shell and by the kernel.
            self._told = max(self._told, 1) if number == signal.SIGHUP else self._told + 1

        # `nohup` has SIGHUP ignored.
        heard = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {number: signal.signal(number, tell) for number in heard}
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
