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
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from sglang_epd import logs
from sglang_epd.cache import Entry
from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue, Job
from sglang_epd.encoder.tower import Prepared, Tower
from sglang_epd.errors import EpdError
from sglang_epd.modality import VIDEO
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

# Its name, when it began and when it ended, in seconds of `time.perf_counter`.
Stage = tuple[str, float, float]


@dataclass(eq=False, kw_only=True)
class Work(Job):
    """One embedding in the making. It has the turn of the asker that would be done with it first.

    Attributes:
        data: the encoded media; None while the store is asked for askers without media.
        pixels: that its media claim, since they are here.
        stages: that are over.
        partly: its embedding while that is being made, and how many rows are there.
    """

    key: bytes
    modality: str
    data: bytes | None
    state: WorkState
    options: Mapping[str, Any] | None = None
    holds: list[Hold] = field(default_factory=list)
    lane: Lane | None = None
    pixels: int = 0
    preparation: asyncio.Future[Prepared] | None = None
    prepared: Prepared | None = None
    losses: int = 0
    partly: tuple[torch.Tensor, int] | None = None
    stages: list[Stage] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    @property
    def media(self) -> bytes:
        """What every stage but a look into the store needs."""
        assert self.data is not None
        return self.data

    def enter(self, state: WorkState) -> None:
        """Take the next state; the time in the last one is a stage.

        Raises:
            RuntimeError: there is no such transition.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self.state} -> {state}")
        now = time.perf_counter()
        if self.state in _STAGES:
            self.stages.append((_STAGES[self.state], self.since, now))
        self.state, self.since = state, now


@dataclass(eq=False)
class Lane:
    """A tower and the work that is assigned to it.

    Attributes:
        free_at: when the last batch ended.
        rate, pixel_rate, typical: patches a second, claimed pixels a second, and patches an
            item of each modality; averages over the recent past.
    """

    tower: Tower
    preparing: set[Work] = field(default_factory=set)
    ready: FairQueue[Work] = field(default_factory=FairQueue)
    running: set[Work] = field(default_factory=set)
    batches: int = 0
    free_at: float = 0.0
    rate: float = 0.0
    prepared_pixels: float = 0.0
    ran_pixels: float = 0.0
    typical: defaultdict[str, float] = field(default_factory=lambda: defaultdict(lambda: 1.0))

    @property
    def patches(self) -> float:
        """Cost of the assigned work, as far as it is known."""
        running = sum(work.cost for work in self.running)
        return self.ready.cost + running + self.expected(self.preparing)

    def expected(self, works: Iterable[Work]) -> float:
        """Patches of items that have not been prepared, as most have."""
        return sum(self.typical[work.modality] for work in works)

    def ahead_s(self, batch: BatchBounds, *, ready: bool) -> float:
        """Until an item has been run, beside its own cost, as far as is known: the work before it
        and the rest of its batch, which all ends at the same time.

        Args:
            ready: whether it is the next of those that are; or it is behind all that is assigned.
        """
        before = sum(work.cost for work in self.running) if ready else self.patches
        rest = min(batch.patches, self.ready.cost if ready else self.patches)
        return (before + rest) / self.rate if self.rate else 0.0

    def count(self) -> int:
        """The items that are assigned to it."""
        return len(self.preparing) + len(self.ready) + len(self.running)

    def has_place(self, *, large: bool) -> bool:
        """Whether its tower can prepare one more.

        Large items leave one place of several free, or a few would hold up all others for as
        long as they are decoded.

        Args:
            large: whether the item takes long to decode.
        """
        places = self.tower.preparers
        if large and _large(self.preparing) >= max(1, places - 1):
            return False
        return len(self.preparing) < places

    def note_prepared(self, work: Work, patches: int, elapsed_s: float) -> None:
        """One of its places took so long for an item."""
        self.typical[work.modality] = _moved(self.typical[work.modality], patches)
        if elapsed_s > 0:
            rate = self.tower.preparers * work.pixels / elapsed_s
            self.prepared_pixels = _moved(self.prepared_pixels, rate)

    def note_ran(self, works: Iterable[Work], patches: float, elapsed_s: float) -> None:
        """A batch took so long."""
        if elapsed_s > 0:
            self.rate = _moved(self.rate, patches / elapsed_s)
            pixels = sum(work.pixels for work in works)
            self.ran_pixels = _moved(self.ran_pixels, pixels / elapsed_s)

    @property
    def pixel_rate(self) -> float:
        """Claimed pixels a second, of the slower of the two stages; 0 where none is known."""
        return min(filter(None, (self.prepared_pixels, self.ran_pixels)), default=0.0)

    @property
    def empty(self) -> bool:
        """Whether no wanted item is assigned to it."""
        return not self.preparing and not self.running and all(work.parked for work in self.ready)

    @property
    def isolated(self) -> bool:
        """Whether an item that is to be alone is on its way, so that nothing else may be."""
        ready = (work for work in self.ready if not work.parked)
        return any(work.alone for work in chain(self.preparing, ready, self.running))

    def full(self, batch: BatchBounds, *, parked: bool = False, large: bool = True) -> bool:
        """Whether a batch is on its way to the tower, for each that it would take at once.

        Videos that are being prepared do not count: one may be more than a batch, and preparing it
        takes longer than its passes.

        Args:
            parked: count unwanted items as well.
            large: count large items that are being prepared as well.
        """
        preparing = [
            work for work in self.preparing if work.modality != VIDEO and (large or not work.large)
        ]
        ready = [work.cost for work in self.ready if parked or not work.parked]
        items = len(ready) + len(preparing)
        patches = sum(ready) + self.expected(preparing)
        batches = max(1, self.tower.depth - self.batches)
        return items >= batches * batch.items or patches >= batches * batch.patches

    def has_batch(self, batch: BatchBounds) -> bool:
        """Whether a batch of what is ready would have no more in it a little later."""
        ready = [work.cost for work in self.ready if not work.parked]
        return (
            not self.preparing
            or len(ready) >= batch.items
            or sum(ready) + min(self.typical[one.modality] for one in self.preparing)
            > batch.patches
        )

    def hasty(self) -> set[Work]:
        """Ready items whose owner needs another one sooner that is being prepared. An idle tower
        does not wait for one that claims more pixels: it may take long."""
        ahead: defaultdict[Hashable, list[Work]] = defaultdict(list)
        for one in self.preparing:
            ahead[one.owner].append(one)
        return {
            work
            for work in self.ready
            if work.owner in ahead and not work.parked
            for one in ahead[work.owner]
            if one.place < work.place and (self.batches or one.pixels <= work.pixels)
        }


def _large(works: Iterable[Work]) -> int:
    return sum(work.large for work in works)


def _moved(average: float, value: float) -> float:
    """A running average with the newest value; 0 before the first."""
    return average + 0.2 * (value - average) if average else value


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, repr=False)
class Hold:
    """One asker's interest in an embedding.

    `Computations` makes it and reports its outcome (`join`, `show`, `give`, `fail`); the
    asker waits, says whether it wants the embedding now, and releases it.

    Attributes:
        key, modality, data, owner, deadline, looked, place, options: as of `Computations.hold`.
        changed: called when the asker wants the embedding again, or does not any more.
        released: called once.
        wanted: whether the embedding is of use now.
        work: the embedding in the making that it waits for, if any.
        entry: the embedding in the cache, pinned for it, if it has one.
        made: done when the embedding is there, or will not be.
        source: how it comes about: "cached", "coalesced" (with another asker), "stored"
            (it was in the shared store) or "computed".
        asked_by: its request, as logs name it.
        began: when it was asked for, in seconds of `time.perf_counter`.
    """

    key: bytes
    modality: str
    data: bytes | None
    owner: str
    deadline: float
    looked: bool
    changed: Callable[[Hold], None]
    released: Callable[[Hold], None]
    place: int = 0
    options: Mapping[str, Any] | None = None
    wanted: bool = True
    work: Work | None = None
    entry: Entry | None = None
    made: asyncio.Future[None] = field(default_factory=_future)
    source: str = "computed"
    asked_by: str = field(default_factory=logs.subject)
    began: float = field(default_factory=time.perf_counter)
    _layout: asyncio.Future[Layout] = field(default_factory=_future)
    _more: asyncio.Future[None] = field(default_factory=_future)
    _stages: list[list[Stage]] = field(default_factory=list)
    _over: bool = False

    # Its asker

    @property
    def stages(self) -> Iterator[Stage]:
        """Its stages, in order, as far as they are over."""
        return chain.from_iterable(self._stages)

    @property
    def ms(self) -> dict[str, float]:
        """Milliseconds that were spent in each stage for this asker."""
        spent: dict[str, float] = {}
        if self.source in ("computed", "stored"):
            for name, began, ended in self.stages:
                spent[name] = round(spent.get(name, 0.0) + (ended - began) * 1e3, 3)
        return spent

    async def layout(self) -> Layout:
        """The embedding's layout, as soon as it is known.

        Raises:
            EpdError: there will be none.
        """
        return await asyncio.shield(self._layout)

    async def embedding(self) -> torch.Tensor:
        """The embedding [tokens, width]; stays until the hold is released or unwanted.

        Raises:
            MediaNeededError: ask again, with the media.
            EpdError: there will be none.
        """
        await asyncio.shield(self.made)
        assert self.entry is not None
        return self.entry.embedding

    async def beginning(self, known: int) -> tuple[torch.Tensor, int] | None:
        """Wait for more rows of an embedding that is being made than so many.

        Returns:
            The embedding and how many of its rows are there; None when all are, or will not be.
        """
        while not self.made.done():
            partly = None if self.work is None else self.work.partly
            if partly is not None and partly[1] > known:
                return partly
            await asyncio.wait((self.made, self._more), return_when=asyncio.FIRST_COMPLETED)
        return None

    def want(self, wanted: bool) -> None:
        """Say whether the embedding is of use now.

        Nothing is run for askers that do not want it now, and their pixels may be dropped where
        memory is short; it is made again when one wants it again.
        """
        if wanted != self.wanted and not self._over:
            self.wanted = wanted
            self.changed(self)

    def release(self) -> None:
        """Give the interest up; may be called again."""
        if not self._over:
            self._over = True
            self.released(self)
            # An error that was raised from here may keep the hold.
            self.data = self.work = self.entry = None

    # `Computations`

    @property
    def failed(self) -> bool:
        return self.made.done() and self.made.exception() is not None

    def begin_again(self) -> None:
        """The embedding that was there has gone."""
        self.made = _future()

    def join(self, work: Work) -> None:
        """Its embedding is being made."""
        self.work = work
        work.holds.append(self)
        self._stages.append(work.stages)

    def show(self, layout: Layout) -> None:
        """The layout is known."""
        if not self._layout.done():
            self._layout.set_result(layout)

    def notice(self) -> None:
        """There are more rows."""
        self._more.set_result(None)
        self._more = _future()

    def give(self, entry: Entry) -> None:
        """The embedding is there, and pinned for this hold."""
        self.work, self.entry = None, entry
        self.show(entry.layout)
        if not self.made.done():
            self.made.set_result(None)

    def fail(self, error: EpdError | MediaNeededError) -> None:
        """There will be no embedding."""
        self.work = None
        # An exception of its own for each: one that is kept keeps the frames it went
        # through, and their locals.
        for future in (self._layout, self.made):
            if not future.done():
                future.set_exception(type(error)(str(error)))
                future.exception()
