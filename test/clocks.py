"""A clock that goes on when a test says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """It stands still, at `now`, but for what is slept."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
