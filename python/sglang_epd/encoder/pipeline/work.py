"""One embedding in the making, and the tower that it is made on: their states.

    looking -> waiting -> preparing -> ready -> running -> done
       |          ^           |          |         |
       |          +-----------+----------+---------+      its tower was lost
       +-> done               |          v         |
       |   (a store has it)   |       dormant <----+      nobody wants it now, and its pixels'
       |                      |                           place is needed (-> waiting)
       +-> failed             +-> failed
           (no store has it, and nobody its media)

Decided and done by `computations`; here is only what is so.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_epd.encoder.pipeline.scheduling import Bounds, FairQueue, Job
from sglang_epd.encoder.tower import Prepared, Tower

if TYPE_CHECKING:
    from sglang_epd.encoder.pipeline.hold import Hold


class State(enum.Enum):
    LOOKING = "looking"
    WAITING = "waiting"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    DORMANT = "dormant"
    DONE = "done"
    FAILED = "failed"


_NEXT = {
    State.LOOKING: {State.WAITING, State.DONE, State.FAILED},
    State.WAITING: {State.PREPARING, State.FAILED},
    State.PREPARING: {State.READY, State.WAITING, State.FAILED},
    State.READY: {State.RUNNING, State.DORMANT, State.WAITING, State.FAILED},
    State.RUNNING: {State.DONE, State.WAITING, State.FAILED},
    State.DORMANT: {State.WAITING, State.FAILED},
    State.DONE: set[State](),
    State.FAILED: set[State](),
}


# Its name, when it began and when it ended, in seconds of `time.perf_counter`.
Stage = tuple[str, float, float]


@dataclass(eq=False)
class Work:
    """One embedding in the making."""

    key: bytes
    modality: str
    # Its encoded media; None while the store is asked for askers who have not read them.
    data: bytes | None
    job: Job
    holds: list[Hold] = field(default_factory=list)
    state: State = State.WAITING
    lane: Lane | None = None
    # What its media claim to be, since they are here.
    pixels: int = 0
    preparation: asyncio.Future[Prepared] | None = None
    prepared: Prepared | None = None
    losses: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    since: float = 0.0

    @property
    def wanted(self) -> bool:
        return any(hold._wanted for hold in self.holds)

    @property
    def media(self) -> bytes:
        """What every stage but a look into the store needs."""
        assert self.data is not None
        return self.data

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
            self.stages.append((stage, self.since, now))
        self.state, self.since = state, now


# In these it ends by itself, soon; whoever leaves, or takes all of them away, waits for that.
# Preparing is ended with the last of them.
UNDER_WAY = (State.LOOKING, State.PREPARING, State.RUNNING)

# What the time in a state is called in answers and metrics.
_STAGES = {
    State.LOOKING: "store",
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
        # Of these, large ones.
        self.preparing_large = 0
        self.batches = 0
        self.running: set[Work] = set()
        # When the last batch ended.
        self.free_at = 0.0
        # Was there when a tower was lost, and gets a tower to itself.
        self.suspect: Work | None = None
        # Patches a second, claimed pixels a second, and patches an item; averages over the
        # recent past.
        self.rate = 0.0
        self.pixel_rate = 0.0
        self.typical = 1.0

    @property
    def patches(self) -> float:
        """What is on its way, as far as can be known."""
        running = sum(work.job.cost for work in self.running)
        return self.ready.cost + running + self.preparing * self.typical

    def has_place(self, *, large: bool) -> bool:
        """Whether its tower can prepare one more.

        Large items leave one place of several free, or a few would hold up everybody for as
        long as they are decoded.
        """
        places = self.tower.preparers
        if large and self.preparing_large >= max(1, places - 1):
            return False
        return self.preparing < places

    def note_prepared(self, pixels: int, elapsed_s: float) -> None:
        """One of its places took so long for an item."""
        if elapsed_s > 0:
            weight = 0.2 if self.pixel_rate else 1.0
            rate = self.tower.preparers * pixels / elapsed_s
            self.pixel_rate += (rate - self.pixel_rate) * weight

    @property
    def empty(self) -> bool:
        """Whether nothing that anybody wants now is on its way."""
        return not self.preparing and not self.running and all(job.parked for job in self.ready)

    @property
    def isolated(self) -> bool:
        """Whether the suspect is on its way, so that nothing else may be."""
        work = self.suspect
        if work is None or work.lane is not self:
            return False
        waits = work.state is State.READY and not work.job.parked
        return waits or work.state in (State.PREPARING, State.RUNNING)

    def full(self, batch: Bounds, *, parked: bool = False, large: bool = True) -> bool:
        """Whether a batch is on its way to the tower.

        Args:
            parked: count what nobody wants now as well.
            large: count large items that are being prepared as well.
        """
        preparing = self.preparing - (0 if large else self.preparing_large)
        ready = [job.cost for job in self.ready if parked or not job.parked]
        items = len(ready) + preparing
        patches = sum(ready) + preparing * self.typical
        return items >= batch.items or patches >= batch.patches
