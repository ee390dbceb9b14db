"""One embedding in the making, and the tower that it is made on: their states.

    looking -> waiting -> preparing -> ready -> running -> done
       |          ^           |          |         |
       |          +-----------+----------+---------+      its tower was lost
       +-> done               |          v         |
       |   (a store has it)   |       dormant <----+      unwanted now, and its pixels'
       |                      |                           place is needed (-> waiting)
       +-> failed             +-> failed
           (no store has it, and no asker its media)

Plain state; `computations` decides and acts. A `Hold` is one asker's interest
in an embedding: several askers share one `Work`.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch

from sglang_epd.cache import Entry
from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue, Job
from sglang_epd.encoder.tower import Prepared, Tower
from sglang_epd.errors import EpdError
from sglang_epd.wire.messages import Layout


class MediaNeededError(Exception):
    """An embedding that was asked for without media is not in the store, or has gone since.

    Its asker asks again, with the media: the error goes no further.
    """


class WorkState(enum.Enum):
    LOOKING = "looking"
    WAITING = "waiting"
    PREPARING = "preparing"
    READY = "ready"
    RUNNING = "running"
    DORMANT = "dormant"
    DONE = "done"
    FAILED = "failed"


_NEXT = {
    WorkState.LOOKING: {WorkState.WAITING, WorkState.DONE, WorkState.FAILED},
    WorkState.WAITING: {WorkState.PREPARING, WorkState.FAILED},
    WorkState.PREPARING: {WorkState.READY, WorkState.WAITING, WorkState.FAILED},
    WorkState.READY: {WorkState.RUNNING, WorkState.DORMANT, WorkState.WAITING, WorkState.FAILED},
    WorkState.RUNNING: {WorkState.DONE, WorkState.WAITING, WorkState.FAILED},
    WorkState.DORMANT: {WorkState.WAITING, WorkState.FAILED},
    WorkState.DONE: set[WorkState](),
    WorkState.FAILED: set[WorkState](),
}


# Its name, when it began and when it ended, in seconds of `time.perf_counter`.
Stage = tuple[str, float, float]


@dataclass(eq=False)
class Work:
    """One embedding in the making."""

    key: bytes
    modality: str
    # Its encoded media; None while the store is asked for askers that have not read them.
    data: bytes | None
    job: Job
    state: WorkState
    holds: list[Hold] = field(default_factory=list)
    lane: Lane | None = None
    # The pixels that its media claim, since they are here.
    pixels: int = 0
    preparation: asyncio.Future[Prepared] | None = None
    prepared: Prepared | None = None
    losses: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    @property
    def wanted(self) -> bool:
        return any(hold.wanted for hold in self.holds)

    @property
    def media(self) -> bytes:
        """What every stage but a look into the store needs."""
        assert self.data is not None
        return self.data

    def enter(self, state: WorkState) -> None:
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


# States that finish by themselves; release() and close() wait for them.
# Preparing is ended with the last of them.
UNDER_WAY = (WorkState.LOOKING, WorkState.PREPARING, WorkState.RUNNING)

# The name of a state's time in answers and metrics.
_STAGES = {
    WorkState.LOOKING: "store",
    WorkState.WAITING: "wait",
    WorkState.PREPARING: "preprocess",
    WorkState.READY: "queue",
    WorkState.RUNNING: "forward",
}


class Lane:
    """A tower and the work that is assigned to it."""

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
        """Cost of the assigned work, as far as it is known."""
        running = sum(work.job.cost for work in self.running)
        return self.ready.cost + running + self.preparing * self.typical

    def has_place(self, *, large: bool) -> bool:
        """Whether its tower can prepare one more.

        Large items leave one place of several free, or a few would hold up all others for as
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
        """Whether no wanted item is assigned to it."""
        return not self.preparing and not self.running and all(job.parked for job in self.ready)

    @property
    def isolated(self) -> bool:
        """Whether the suspect is on its way, so that nothing else may be."""
        work = self.suspect
        if work is None or work.lane is not self:
            return False
        waits = work.state is WorkState.READY and not work.job.parked
        return waits or work.state in (WorkState.PREPARING, WorkState.RUNNING)

    def full(self, batch: BatchBounds, *, parked: bool = False, large: bool = True) -> bool:
        """Whether a batch is on its way to the tower, for each that it would take at once.

        Args:
            parked: count unwanted items as well.
            large: count large items that are being prepared as well.
        """
        preparing = self.preparing - (0 if large else self.preparing_large)
        ready = [job.cost for job in self.ready if parked or not job.parked]
        items = len(ready) + preparing
        patches = sum(ready) + preparing * self.typical
        batches = max(1, self.tower.depth - self.batches)
        return items >= batches * batch.items or patches >= batches * batch.patches

    def has_batch(self, batch: BatchBounds) -> bool:
        """Whether a batch of what is ready would have no more in it a little later."""
        ready = [job.cost for job in self.ready if not job.parked]
        return (
            not self.preparing
            or len(ready) >= batch.items
            or sum(ready) + self.typical > batch.patches
        )


class Hold:
    """One asker's interest in an embedding.

    `Computations` makes it and reports its outcome (`join`, `show`, `give`, `fail`); the
    asker waits, says whether it wants the embedding now, and releases it.

    Args:
        key: of the embedding.
        modality: of the item.
        data: its encoded media; None where the embedding is at hand.
        job: its turn, owner and deadline.
        looked: the store does not have the embedding.
        changed: called when the asker wants the embedding again, or does not any more.
        released: called once, with the work or the cache's entry that it had.

    Attributes:
        wanted: whether the embedding is of use now.
        work: the embedding in the making that it waits for, if any.
        entry: the embedding in the cache, pinned for it, if it has one.
        source: how it comes about: "cached", "coalesced" (with another asker), "stored"
            (it was in the shared store) or "computed".
        ms: milliseconds that it spent in each stage.
        began: when it was asked for, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        key: bytes,
        modality: str,
        data: bytes | None,
        job: Job,
        *,
        looked: bool,
        changed: Callable[[Hold], None],
        released: Callable[[Hold, Work | None, Entry | None], None],
    ) -> None:
        self.key = key
        self.modality = modality
        self.data = data
        self.job = job
        self.looked = looked
        self._changed = changed
        self._released = released
        self._over = False
        self.wanted = True
        self.work: Work | None = None
        self.entry: Entry | None = None
        self._layout: Layout | None = None
        self._known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.source = "computed"
        self.ms: dict[str, float] = {}
        self.began = time.perf_counter()
        self._stages: list[list[Stage]] = []

    # Its asker

    @property
    def stages(self) -> Iterator[Stage]:
        """Its stages, in order, as far as they are over."""
        return chain.from_iterable(self._stages)

    async def layout(self) -> Layout:
        """The embedding's layout, as soon as it is known.

        Raises:
            EpdError: there will be none.
        """
        await asyncio.shield(self._known)
        assert self._layout is not None
        return self._layout

    @property
    def made(self) -> asyncio.Future[None]:
        """Done when the embedding is there, or will not be."""
        return self._made

    async def embedding(self) -> torch.Tensor:
        """The embedding [tokens, width]; stays until the hold is released or unwanted.

        Raises:
            MediaNeededError: ask again, with the media.
            EpdError: there will be none.
        """
        await asyncio.shield(self._made)
        assert self.entry is not None
        return self.entry.embedding

    def want(self, wanted: bool) -> None:
        """Say whether the embedding is of use now.

        Nothing is run for askers that do not want it now, and their pixels may be dropped where
        memory is short; it is made again when one wants it again.
        """
        if wanted != self.wanted and not self._over:
            self.wanted = wanted
            self._changed(self)

    def release(self) -> None:
        """Give the interest up; may be called again."""
        if not self._over:
            self._over = True
            self.data = None  # an error that was raised from here may keep the hold
            work, entry, self.work, self.entry = self.work, self.entry, None, None
            self._released(self, work, entry)

    # `Computations`

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return self._made.done() and self._made.exception() is not None

    def begin_again(self) -> None:
        """The embedding that was there has gone."""
        self._made = asyncio.get_running_loop().create_future()

    def join(self, work: Work) -> None:
        """Its embedding is being made."""
        self.work = work
        work.holds.append(self)
        self._stages.append(work.stages)

    def show(self, layout: Layout) -> None:
        """The layout is known."""
        self._layout = layout
        if not self._known.done():
            self._known.set_result(None)

    def give(self, entry: Entry) -> None:
        """The embedding is there, and pinned for this hold."""
        self.work, self.entry = None, entry
        self.show(entry.layout)
        if not self._made.done():
            self._made.set_result(None)

    def fail(self, error: EpdError | MediaNeededError) -> None:
        """There will be no embedding."""
        self.work = None
        # An exception of its own for each: one that is kept keeps the frames it went
        # through, and their locals.
        for future in (self._known, self._made):
            if not future.done():
                future.set_exception(type(error)(str(error)))
                future.exception()
