"""A circuit breaker: who fails again and again is left alone for a while.

    closed --failures--> open --pause--> half-open --success--> closed
                           ^                 |
                           +----failure------+      and the pause doubles

Plain data: the time is passed in. What counts as a failure is its user's to say.
"""

from __future__ import annotations

import enum

_FAILURES = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class State(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


_NEXT = {
    State.CLOSED: {State.OPEN},
    State.OPEN: {State.HALF_OPEN},
    State.HALF_OPEN: {State.CLOSED, State.OPEN},
}


class Breaker:
    """Admits calls, and is told how each of them ended: by exactly one of `succeeded`,
    `failed` and `left_open`.

    Args:
        failures: so many in a row open it.
        first_pause_s, longest_pause_s: how long it stays open before one call is tried;
            doubled each time that one fails.
    """

    def __init__(
        self,
        failures: int = _FAILURES,
        first_pause_s: float = _FIRST_PAUSE_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        self.state = State.CLOSED
        self._limit = failures
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._pause_s = first_pause_s
        self._failures = 0
        self._open_until = 0.0
        self._probing = False

    def admits(self, now: float) -> bool:
        """Whether a call may be made now; one that may has to be told of."""
        if self.state is State.OPEN and now >= self._open_until:
            self._enter(State.HALF_OPEN)
        if self.state is State.HALF_OPEN:
            # One at a time: the others would wait for what is not there.
            admitted, self._probing = not self._probing, True
            return admitted
        return self.state is State.CLOSED

    def blocks(self, now: float) -> bool:
        """Whether no call may be made now; unlike `admits`, asking promises none."""
        return self.state is State.OPEN and now < self._open_until

    def succeeded(self) -> None:
        """A call was answered."""
        self._failures = 0
        if self.state is State.HALF_OPEN:
            self._pause_s = self._first_pause_s
            self._enter(State.CLOSED)

    def failed(self, now: float) -> None:
        """A call was not answered, or with an error."""
        self._failures += 1
        if self.state is State.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            self._open(now)
        elif self.state is State.CLOSED and self._failures >= self._limit:
            self._open(now)

    def left_open(self) -> None:
        """A call ended without a word about the other side: its caller left."""
        self._probing = False

    def _open(self, now: float) -> None:
        self._enter(State.OPEN)
        self._open_until = now + self._pause_s

    def _enter(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.state} -> {state}")
        self.state = state
        self._probing = False
