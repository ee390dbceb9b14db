"""How much of the recent past towers spent running: plain data, no clock."""

from __future__ import annotations

from collections import deque

_SPAN_S = 60.0


class Utilisation:
    """Spans of time in which one of several towers ran."""

    def __init__(self, towers: int) -> None:
        self._towers = towers
        self._busy: deque[tuple[float, float]] = deque()

    def note(self, began: float, ended: float) -> None:
        """A tower ran; called in the order of the ends."""
        self._busy.append((began, ended))
        self._forget(ended - _SPAN_S)

    def share(self, now: float) -> float:
        """Of the last minute, 0 to 1."""
        since = now - _SPAN_S
        self._forget(since)
        busy_s = sum(ended - max(began, since) for began, ended in self._busy)
        return min(busy_s / (_SPAN_S * self._towers), 1.0)

    def _forget(self, before: float) -> None:
        while self._busy and self._busy[0][1] < before:
            self._busy.popleft()
