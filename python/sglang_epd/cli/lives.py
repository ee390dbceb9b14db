"""The life of one supervised server: a table of states, and the next step that is due.

Plain data: the caller passes in whether the process runs and answers, and the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a server is in its life."""

    PENDING = "pending"  # not started: others have to be ready first
    STARTING = "starting"  # runs, and has not answered yet
    READY = "ready"
    SILENT = "silent"  # runs, and no longer answers
    DOWN = "down"  # has ended, and will be started again
    FAILED = "failed"  # has ended too often, or before it was ever ready
    STOPPED = "stopped"  # on request


# And STOPPED, from each.
_NEXT: dict[State, set[State]] = {
    State.PENDING: {State.STARTING},
    State.STARTING: {State.READY, State.DOWN, State.FAILED},
    State.READY: {State.SILENT, State.DOWN, State.FAILED},
    State.SILENT: {State.READY, State.DOWN, State.FAILED},
    State.DOWN: {State.STARTING},
    State.FAILED: set(),
    State.STOPPED: set(),
}


@dataclass(frozen=True)
class Restarts:
    """How often, and how soon, a server that has died is started again.

    Attributes:
        most: deaths within `within_s` that are made good; one more is the last.
        first_s, longest_s: the pause before a restart, doubled by each death in that time.
        silences: health checks in a row that may fail before a server counts as silent.
    """

    most: int = 5
    within_s: float = 600.0
    first_s: float = 1.0
    longest_s: float = 30.0
    silences: int = 3


class Life:
    """One server's state, its deaths, and when it is due."""

    def __init__(self, restarts: Restarts) -> None:
        self._bounds = restarts
        self._deaths: deque[float] = deque()
        self._due = 0.0
        self._unanswered = 0
        self._was_ready = False
        self.state = State.PENDING
        self.restarts = 0

    @property
    def running(self) -> bool:
        """Whether its process ought to be there."""
        return self.state in (State.STARTING, State.READY, State.SILENT)

    def due(self, now: float) -> bool:
        """Whether it is to be started, as far as it is concerned itself."""
        return self.state is State.PENDING or (self.state is State.DOWN and now >= self._due)

    def wait_s(self, now: float) -> float:
        """Seconds until it is started again; 0 in all states but `DOWN`."""
        return max(0.0, self._due - now) if self.state is State.DOWN else 0.0

    def started(self) -> None:
        """Its process has been started."""
        if self.state is State.DOWN:
            self.restarts += 1
        self._unanswered = 0
        self._to(State.STARTING)

    def answered(self, ok: bool) -> None:
        """A health check came back."""
        self._unanswered = 0 if ok else self._unanswered + 1
        if ok and self.state in (State.STARTING, State.SILENT):
            self._was_ready = True
            self._to(State.READY)
        elif self.state is State.READY and self._unanswered >= self._bounds.silences:
            self._to(State.SILENT)

    def ended(self, now: float) -> None:
        """Its process ended without a request to stop; for good, if it was never ready: the
        fault, a flag or the checkpoint, stays wrong."""
        self._deaths.append(now)
        while self._deaths[0] < now - self._bounds.within_s:
            self._deaths.popleft()
        if not self._was_ready or len(self._deaths) > self._bounds.most:
            self._to(State.FAILED)
            return
        pause = self._bounds.first_s * 2 ** (len(self._deaths) - 1)
        self._due = now + min(self._bounds.longest_s, pause)
        self._to(State.DOWN)

    def stopped(self) -> None:
        """It has stopped on request."""
        self.state = State.STOPPED

    def _to(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"{self.state.value} -> {state.value} is no step of a server")
        self.state = state
