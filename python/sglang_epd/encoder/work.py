"""One embedding in the making, and the tower that it is made on: their states.

    waiting -> preparing -> ready -> running -> done
       ^           |          |         |
       +-----------+----------+---------+      its tower was lost
                   |          v         |
                   |       dormant <----+      nobody wants it now, and its pixels'
                   |                           place is needed (-> waiting)
                   +-> failed

Decided and done by `computations`; here is only what is so.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_epd.encoder.scheduling import FairQueue, Job
from sglang_epd.encoder.tower import Prepared, Tower

if TYPE_CHECKING:
    from sglang_epd.encoder.computations import Hold


class State(enum.Enum):
    WAITING = "waiting"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    DORMANT = "dormant"
    DONE = "done"
    FAILED = "failed"


_NEXT = {
    State.WAITING: {State.PREPARING, State.FAILED},
    State.PREPARING: {State.READY, State.WAITING, State.FAILED},
    State.READY: {State.RUNNING, State.DORMANT, State.WAITING, State.FAILED},
    State.RUNNING: {State.DONE, State.WAITING, State.FAILED},
    State.DORMANT: {State.WAITING, State.FAILED},
    State.DONE: set[State](),
    State.FAILED: set[State](),
}


@dataclass(eq=False)
class Work:
    """One embedding in the making."""

    key: bytes
    modality: str
    data: bytes
    job: Job
    holds: list[Hold] = field(default_factory=list)
    state: State = State.WAITING
    lane: Lane | None = None
    prepared: Prepared | None = None
    losses: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    since: float = 0.0

    @property
    def wanted(self) -> bool:
        return any(hold._wanted for hold in self.holds)

    def enter(self, state: State) -> None:
        """Take the next state; the time in the last one counts under its name.

        Raises:
            RuntimeError: there is no such transition.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.state} -> {state}")
        now = time.perf_counter()
        stage = _STAGES.get(self.state)
        if stage is not None:
            self.ms[stage] = round(self.ms.get(stage, 0.0) + (now - self.since) * 1e3, 3)
        self.state, self.since = state, now


# What the time in a state is called in answers and metrics.
_STAGES = {
    State.WAITING: "wait",
    State.PREPARING: "preprocess",
    State.READY: "queue",
    State.RUNNING: "forward",
}


class Lane:
    """A tower and what is on its way to it."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self.ready = FairQueue()
        self.preparing = 0
        self.running: list[Work] = []
        # Patches a second, and patches an item; averages over the recent past.
        self.rate = 0.0
        self.typical = 1.0

    @property
    def patches(self) -> float:
        """What is on its way, as far as can be known."""
        running = sum(work.job.cost for work in self.running)
        return self.ready.cost + running + self.preparing * self.typical
