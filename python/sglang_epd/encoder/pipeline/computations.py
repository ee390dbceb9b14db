"""Makes each embedding once, for all simultaneous requests; retries those of lost towers.

An asker gets a `Hold` on the embedding of a key. Behind it is an entry of the cache, or
one piece of `work` that all askers of the key share. Work begins with a look into the
shared store, if there is one, and its embedding is written to that store, too.

Work ends at the next state boundary once it has no hold. Preparing and running overlap:
each tower has a queue of ready items, filled as far as one batch ahead. `scheduling` decides
the order, `cache` what stays. Owns neither media nor sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sglang_epd import logs
from sglang_epd.cache import EmbeddingCache, Entry
from sglang_epd.encoder.breakage import drop_frames
from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue, Utilisation
from sglang_epd.encoder.pipeline.work import (
    UNDER_WAY,
    Hold,
    Lane,
    MediaNeededError,
    Work,
    WorkState,
)
from sglang_epd.encoder.tower import Tower, TowerBrokenError, TowerLostError
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EncoderLostError,
    EpdError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.media.size import SMALL_PIXELS, claimed_pixels
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.store import SharedStore
from sglang_epd.wire.messages import Layout
from sglang_epd.wire.tensors import alone, spec_bytes

logger = logging.getLogger(__name__)

# Embeddings that may be kept for askers that cannot use them yet, on top of the cache.
_KEPT_BYTES = 64 << 20
# An item that was there each time a tower was lost is not tried again.
_MAX_LOSSES = 2
# Of so many works, and so many of their askers, a log line may say the names.
_SAID = 4
_LOOK_AGAIN_S = 0.2
_SHUTTING_DOWN = "this encoder is shutting down"


class Computations:
    """The stages between an item's bytes and its embedding.

    Args:
        towers: at least one.
        batch: bounds on one forward pass.
        staged_bytes: embeddings in use or being made; past it no batch is begun.
        store: asked before an embedding is made, and filled behind it, if there is one.

    Attributes:
        broken: set when a tower is broken that cannot be started again: this process is of no use
            any more.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        cache: EmbeddingCache,
        metrics: EncoderMetrics,
        *,
        batch: BatchBounds,
        staged_bytes: int = 1 << 30,
        store: SharedStore | None = None,
    ) -> None:
        self.cache = cache
        self.store = store
        self._metrics = metrics
        self._batch = batch
        self._staged_bytes = staged_bytes
        self._lanes = [Lane(tower) for tower in towers]
        self._waiting: FairQueue[Work] = FairQueue()
        self._works: dict[bytes, Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Pinned for askers that do not want them now: how many such.
        self._kept: Counter[Entry] = Counter()
        self._look_again: asyncio.TimerHandle | None = None
        self._pumping = False
        # Why nothing is made any more; empty while there is no such reason.
        self._refusal = ""
        self.broken = asyncio.Event()
        self._utilisation = Utilisation(len(towers))
        metrics.patches_queued.set_function(self._patches)
        metrics.items_queued.set_function(lambda: len(self._works))
        for number, lane in enumerate(self._lanes):
            metrics.beside.watch_tower(number, lane.count)

    def at_hand(self, key: bytes, *, looked: bool = False) -> bool:
        """Whether `hold` may do without media: the embedding is here or in the making, or a
        store may have it.

        Args:
            looked: a hold without media has heard that it needs them.
        """
        work = self._works.get(key)
        if key in self.cache or (work is not None and work.data is not None):
            return True
        store_may = self.store is not None and self.store.readable
        return not looked and (work is not None or store_may)

    def hold(
        self,
        key: bytes,
        modality: str,
        data: bytes | None,
        owner: str,
        deadline: float,
        *,
        place: int = 0,
        looked: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Hold:
        """Ask for an embedding.

        Args:
            key: names it; equal keys are of equal content, options and model.
            data: the encoded media; None if it is at hand. Should it be gone when it is
                wanted, or not be in the store, the hold raises MediaNeededError.
            owner: whose turn it is taken in.
            deadline: in seconds of `time.monotonic()`; nothing is begun after it.
            place: among those that the owner asks for; the smallest is made first.
            looked: as of `at_hand`: the store is not asked once more.
            options: of the item, which the key covers.
        """
        hold = Hold(
            key,
            modality,
            data,
            owner,
            deadline,
            looked,
            place=place,
            options=options,
            changed=self._want,
            released=self._release,
        )
        self._attach(hold, new=True)
        # A lookup that a store is asked for is counted when it has answered.
        if hold.source != "computed" or looked or self.store is None:
            self._metrics.lookups.labels(hold.source).inc()
        self._pump_soon()
        return hold

    def status(self) -> dict[str, Any]:
        """Queues, rates and the cache, for people and dispatchers."""
        states = dict.fromkeys(
            ("looking", "waiting", "preparing", "ready", "running", "dormant"), 0
        )
        for work in self._works.values():
            states[work.state.value] += 1
        cache = self.cache
        return {
            "queue": states,
            "patches_queued": self._patches(),
            "patches_per_s": round(sum(lane.rate for lane in self._lanes), 1),
            "wait_s": round(self.expected_wait_s(), 3),
            "utilisation": round(self.utilisation(), 3),
            "towers": [
                {"alive": lane.tower.alive, "patches": int(lane.patches)} for lane in self._lanes
            ],
            "weights_bytes": sum(lane.tower.weights_bytes for lane in self._lanes),
            "staged_bytes": self._in_use(),
            "max_staged_bytes": self._staged_bytes,
            "cache": {
                "entries": len(cache),
                "bytes": cache.nbytes,
                "pinned_bytes": cache.pinned_bytes,
                "capacity_bytes": cache.capacity_bytes,
            },
            **({"store": self.store.status()} if self.store is not None else {}),
        }

    @property
    def able(self) -> bool:
        """Whether any tower can work now."""
        return any(lane.tower.alive for lane in self._lanes)

    def expected_wait_s(self) -> float:
        """How long something new would wait, as far as is known; 0 where it is not."""
        rate = sum(lane.rate for lane in self._lanes)
        return self._patches() / rate if rate > 0 else 0.0

    def utilisation(self) -> float:
        """Share of the last minute in which towers ran, 0 to 1."""
        return self._utilisation.share(time.monotonic())

    async def close(self) -> None:
        """Fail all work and wait until the towers have let go of it."""
        self._refuse(_SHUTTING_DOWN)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._refuse(_SHUTTING_DOWN)  # items prepared meanwhile

    def _refuse(self, why: str) -> None:
        """Make nothing any more, and fail waiting work; batches that run end by themselves, and
        has `_pump` look again."""
        self._refusal = self._refusal or why
        for work in list(self._works.values()):
            if work.state not in UNDER_WAY:
                self._fail(work, UnavailableError(self._refusal))

    def _break(self, reason: str, works: Sequence[Work]) -> None:
        """The tower was broken when it had these, one of which may have done it."""
        self._refuse("this encoder's vision tower is broken")
        for work in works:
            if work.state in UNDER_WAY:
                self._fail(work, EncoderLostError(self._refusal))
        if not self.broken.is_set():
            logger.critical("The vision tower is broken: %s", reason)
            self.broken.set()

    # Askers

    def _attach(self, hold: Hold, *, new: bool = False) -> None:
        entry = self.cache.find(hold.key)
        if entry is not None:
            hold.source = "cached"
            self._give(hold, entry)
            return
        if self._refusal:
            hold.fail(UnavailableError(self._refusal))
            return
        work = self._works.get(hold.key)
        if work is None:
            store = None if hold.looked else self.store
            if hold.data is None and store is None:
                hold.fail(MediaNeededError("the embedding of known media is gone"))
                return
            hold.source = "computed"
            work = self._works[hold.key] = Work(
                hold.owner,
                0.0,
                hold.deadline,
                hold.place,
                key=hold.key,
                modality=hold.modality,
                data=hold.data,
                state=WorkState.WAITING if store is None else WorkState.LOOKING,
                options=hold.options,
            )
            if store is None:
                self._let_wait(work)
            else:
                self._spawn(self._look(work, store, new), [work])
        else:
            hold.source = "coalesced"
            if work.data is None:
                work.data = hold.data
            work.deadline = max(work.deadline, hold.deadline)
            self._hand_over(work, hold)
        hold.join(work)
        self._consider(work)
        if work.prepared is not None:
            hold.show(work.prepared.layout)

    def _hand_over(self, work: Work, hold: Hold) -> None:
        """Give work that waits the turn of an asker that would be done with it sooner."""
        for queue in self._queues():
            if work in queue and queue.end_of(hold.owner, work.cost) < queue.end_of(work.owner):
                queue.remove(work)
                work.owner, work.place = hold.owner, hold.place
                queue.push(work)

    def _push(self, work: Work, queue: FairQueue[Work]) -> None:
        """Let work wait in the turn of the asker that would be done with it first."""
        if work.holds:
            soonest = min(work.holds, key=lambda hold: queue.end_of(hold.owner, work.cost))
            work.owner, work.place = soonest.owner, soonest.place
        queue.push(work)

    def _want(self, hold: Hold) -> None:
        if hold.work is not None:
            self._consider(hold.work)
        elif hold.entry is not None:
            if hold.wanted:
                self._kept -= Counter((hold.entry,))
            else:
                self._keep(hold, hold.entry)
        elif hold.wanted and not hold.failed:
            hold.begin_again()
            self._attach(hold)
        self._pump_soon()

    def _release(self, hold: Hold) -> None:
        work = hold.work
        if hold.entry is not None:
            if not hold.wanted:
                self._kept -= Counter((hold.entry,))
            self.cache.release(hold.entry)
        elif work is not None:
            work.holds.remove(hold)
            if work.holds:
                work.deadline = max(other.deadline for other in work.holds)
                for queue in self._queues():
                    if work in queue:
                        queue.hurry(work)
                self._consider(work)
            elif work.state not in UNDER_WAY:
                self._end(work, WorkState.FAILED)
            elif work.preparation is not None:
                work.preparation.cancel()
                work.preparation = None
        self._pump_soon()

    def _give(self, hold: Hold, entry: Entry) -> None:
        """An entry that is pinned for this hold."""
        hold.give(entry)
        if not hold.wanted:
            self._keep(hold, entry)

    def _keep(self, hold: Hold, entry: Entry) -> None:
        """Until an asker without memory wants it, if there is room for that."""
        if sum(kept.nbytes for kept in {*self._kept, entry}) <= _KEPT_BYTES:
            self.cache.own(entry)
            self._kept[entry] += 1
        else:
            self.cache.release(entry)
            hold.entry = None

    def _consider(self, work: Work) -> None:
        """Act upon whether a hold wants it now."""
        work.parked = not any(hold.wanted for hold in work.holds)
        if not work.parked and work.state is WorkState.DORMANT:
            self._begin_again(work)

    def _begin_again(self, work: Work) -> None:
        work.prepared, work.lane, work.partly = None, None, None
        work.enter(WorkState.WAITING)
        self._let_wait(work)

    def _let_wait(self, work: Work) -> None:
        """Its turn to be prepared, measured in pixels as that of all waiting work."""
        work.pixels = work.pixels or claimed_pixels(work.modality, work.media)
        work.cost = work.pixels
        work.large = work.pixels > SMALL_PIXELS
        self._push(work, self._waiting)

    # Stages

    async def _look(self, work: Work, store: SharedStore, new: bool) -> None:
        found = await store.find(work.key, work.modality)
        # A lookup that needs media is counted when its asker has come again with them.
        if new and (found is not None or work.data is not None):
            self._metrics.lookups.labels("computed" if found is None else "stored").inc()
        if found is not None:
            for hold in work.holds:
                if hold.source == "computed":
                    hold.source = "stored"
            self._share(work, found.layout, found.embedding)
        elif work.holds and work.data is not None:
            self._begin_again(work)
        else:
            self._fail(work, MediaNeededError("the store does not have the embedding"))

    def _pump_soon(self) -> None:
        """Once for all that changes in one turn of the event loop: a request may have a thousand
        items."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Begin all work that may begin now."""
        self._pumping = False
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        if self._refusal:
            self._refuse(self._refusal)
            return
        now = time.monotonic()
        for queue in self._queues():
            for work in queue.take_expired(now):
                self._fail(work, DeadlineError("the request's deadline passed"))
        for lane in self._lanes:
            if not lane.tower.alive:
                self._take_back(lane)
            else:
                while lane.batches < lane.tower.depth and self._begin_running(lane, now):
                    pass
        while self._begin_preparing(now):
            pass
        if self._works and not all(lane.tower.alive for lane in self._lanes):
            # No event says when a tower that was lost is back.
            loop = asyncio.get_running_loop()
            self._look_again = loop.call_later(_LOOK_AGAIN_S, self._pump)

    def _begin_preparing(self, now: float) -> bool:
        """Hand a tower the next item to prepare; False if there is none, or no place."""
        if self._preparer() is None:
            return False
        # Waiting work is measured in pixels, until it has been prepared.
        rate = sum(lane.pixel_rate for lane in self._lanes)
        ahead_s = min(lane.ahead_s(self._batch, ready=False) for lane in self._lanes)
        work = self._waiting.first(now, rate, ahead_s=ahead_s)
        lane = self._preparer(work.large, work.alone) if work is not None else None
        if lane is None and work is not None and work.large and not work.alone:
            work = self._waiting.first(now, rate, large=False, ahead_s=ahead_s)
            lane = self._preparer(work.large, work.alone) if work is not None else None
        if work is None or lane is None:
            return False
        self._make_room(lane)
        self._waiting.begin([work])
        work.enter(WorkState.PREPARING)
        work.lane = lane
        lane.preparing.add(work)
        self._spawn(self._prepare(work, lane), [work])
        return True

    def _preparer(self, large: bool = False, alone: bool = False) -> Lane | None:
        """The lane that is to prepare an item, if any has room for more."""
        able = [
            lane
            for lane in self._lanes
            if lane.tower.alive
            and lane.has_place(large=large)
            and not lane.isolated
            and not lane.full(self._batch, large=large)
            and (lane.empty or not alone)
        ]
        return min(able, key=lambda lane: lane.patches, default=None)

    def _make_room(self, lane: Lane) -> None:
        """Drop unwanted pixels where others need their place."""
        for work in [work for work in lane.ready if work.parked]:
            if not lane.full(self._batch, parked=True):
                break
            lane.ready.remove(work)
            self._discard(work)
            work.enter(WorkState.DORMANT)

    async def _prepare(self, work: Work, lane: Lane) -> None:
        began = time.monotonic()
        deadline = work.deadline
        try:
            preparing = lane.tower.prepare(work.modality, work.media, deadline, work.options)
            work.preparation = asyncio.ensure_future(preparing)
            prepared = await work.preparation
        except asyncio.CancelledError:
            if work.preparation is not None:  # not by us
                raise
            # It was unwanted; an asker may have come since.
            if work.holds:
                self._begin_again(work)
            else:
                self._end(work, WorkState.FAILED)
            return
        except TowerLostError:
            self._lost(work)
            self._take_back(lane)
            return
        except TowerBrokenError as error:
            self._break(str(error), [work])
            return
        except Exception as error:
            later = work.deadline > deadline and work.holds
            if isinstance(error, DeadlineError) and later:
                # Of those that had asked when it was begun; an asker with more time has come.
                self._begin_again(work)
            else:
                self._fail(work, _said(error, work))
            drop_frames(error)  # they have the media
            return
        finally:
            work.preparation = None  # it holds the prepared item
            lane.preparing.remove(work)
        work.prepared = prepared
        lane.note_prepared(work, prepared.patches, time.monotonic() - began)
        if not work.holds:
            self._end(work, WorkState.FAILED)
            return
        for hold in work.holds:
            hold.show(prepared.layout)
        work.cost = max(prepared.patches, 1)
        work.nbytes = spec_bytes(prepared.layout.embedding)
        work.group = prepared.group
        work.enter(WorkState.READY)
        self._push(work, lane.ready)

    def _begin_running(self, lane: Lane, now: float) -> bool:
        """Hand the lane's tower the next batch; False if there is none."""
        if lane.isolated and lane.preparing:
            return False
        hasty = lane.hasty()
        if lane.batches and (hasty or not lane.has_batch(self._batch)):
            # The tower has something to do until there is more: small passes take as long.
            return False
        in_use = self._in_use()
        room = self._staged_bytes - in_use if in_use > 0 else float("inf")
        ahead_s = lane.ahead_s(self._batch, ready=True)
        works = lane.ready.take(
            now,
            self._batch,
            lane.rate,
            room,
            ahead_s=ahead_s,
            without=hasty,
            idle=lane.tower.depth > 1 and not lane.batches,
        )
        if not works:
            return False
        for work in works:
            work.enter(WorkState.RUNNING)
        lane.batches += 1
        lane.running.update(works)
        self._spawn(self._run(lane, works), list(works))
        return True

    def _in_use(self) -> int:
        """Bytes of embeddings that are being made or used.

        Embeddings that only receivers without memory wait for do not count here: `_KEPT_BYTES`
        bounds them.
        """
        kept = sum(entry.nbytes for entry, holds in self._kept.items() if holds == entry.pins)
        running = sum(work.nbytes for lane in self._lanes for work in lane.running)
        return self.cache.pinned_bytes - kept + running

    async def _run(self, lane: Lane, works: list[Work]) -> None:
        batch = list(works)
        try:
            await self._run_batch(lane, works)
        except TowerLostError:
            for work in works:
                if work.state is WorkState.RUNNING:
                    self._lost(work)
            self._take_back(lane)
        except TowerBrokenError as error:
            self._break(str(error), works)
        finally:
            lane.batches -= 1
            lane.running.difference_update(batch)

    async def _run_batch(self, lane: Lane, works: list[Work]) -> None:
        """Run a batch; one that fails is run again in halves, so that the bad item fails alone."""
        batch = [work.prepared for work in works]
        began = time.monotonic()
        try:
            embeddings = await lane.tower.forward(
                [one for one in batch if one is not None], partial(_tell, works[0])
            )
        except (TowerLostError, TowerBrokenError):
            raise
        except Exception as error:
            self._note_busy(lane, began)
            if len(works) == 1:
                self._fail(works[0], _said(error, works[0]))
                return
            logger.warning("A batch of %d failed, running it in halves: %s", len(works), error)
            middle = len(works) // 2
            del error, batch
            for half in (works[:middle], works[middle:]):
                still = [work for work in half if work.holds]
                for work in half:
                    if not work.holds:
                        self._end(work, WorkState.FAILED)
                if still:
                    await self._run_batch(lane, still)
            return
        elapsed_s = self._note_busy(lane, began)
        patches = sum(work.cost for work in works)
        self._metrics.batch_patches.observe(patches)
        self._metrics.batch_items.observe(len(works))
        self._metrics.beside.forward([work.modality for work in works], elapsed_s)
        lane.note_ran(works, patches, elapsed_s)
        while works:
            work = works.pop(0)
            lane.running.discard(work)
            self._finish(work, embeddings.pop(0))

    def _note_busy(self, lane: Lane, began: float) -> float:
        """How long a batch ran: from when it was handed over, or the one before had ended."""
        ended = time.monotonic()
        began = max(began, lane.free_at)
        lane.free_at = ended
        self._utilisation.note(began, ended)
        self._metrics.busy_seconds.inc(ended - began)
        return ended - began

    def _finish(self, work: Work, embedding: torch.Tensor) -> None:
        assert work.prepared is not None
        layout, work.prepared = work.prepared.layout, None
        if self.store is not None:
            embedding = alone(embedding)  # it may wait to be written
        self._share(work, layout, embedding)
        if self.store is not None:
            self.store.keep(work.key, layout, embedding)

    def _share(self, work: Work, layout: Layout, embedding: torch.Tensor) -> None:
        """Give it to all its holds."""
        holds, work.holds = work.holds, []
        self._end(work, WorkState.DONE)
        entry = self.cache.add(work.key, layout, embedding)
        for hold in holds:
            pinned = self.cache.find(work.key)
            assert pinned is entry
            self._give(hold, entry)
        self.cache.release(entry)
        self._metrics.beside.made(work.modality, work.stages)

    def _take_back(self, lane: Lane) -> None:
        """Work that was ready on a lost tower begins again."""
        for work in list(lane.ready):
            lane.ready.remove(work)
            self._discard(work)
            self._begin_again(work)

    def _lost(self, work: Work) -> None:
        """Its tower is gone: from the beginning, alone, and not for ever."""
        work.losses += 1
        work.alone = True
        self._metrics.lost_items.inc()
        if work.losses > _MAX_LOSSES or not work.holds or self._refusal:
            self._fail(work, EncodeError("the encoder's worker process died on this item"))
        else:
            self._begin_again(work)

    def _fail(self, work: Work, error: EpdError | MediaNeededError) -> None:
        holds, work.holds = work.holds, []
        self._end(work, WorkState.FAILED)
        for hold in holds:
            hold.fail(error)

    def _end(self, work: Work, state: WorkState) -> None:
        for queue in self._queues():
            if work in queue:
                queue.remove(work)
        self._discard(work)
        work.enter(state)
        for stage, began, ended in work.stages:
            self._metrics.stage_seconds.labels(stage).observe(ended - began)
        del self._works[work.key]
        work.data = None  # a batch that still runs may keep the work

    def _discard(self, work: Work) -> None:
        if work.prepared is not None and work.lane is not None:
            work.lane.tower.discard(work.prepared)
            work.prepared = None

    def _queues(self) -> Iterator[FairQueue[Work]]:
        yield self._waiting
        for lane in self._lanes:
            yield lane.ready

    def _patches(self) -> int:
        waiting = max(lane.expected(self._waiting) for lane in self._lanes)
        return int(sum(lane.patches for lane in self._lanes) + waiting)

    def _spawn(self, stage: Coroutine[Any, Any, None], works: list[Work]) -> None:
        # Logged under its askers' requests, not under that of the one that set it off.
        with logs.about(_askers(works)):
            task = asyncio.create_task(stage)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._stage_done(task, works))

    def _stage_done(self, task: asyncio.Task[None], works: list[Work]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            error = None if task.cancelled() else task.exception()
            logger.error("An encoder stage failed", exc_info=error)
            # Or these embeddings would never be made again.
            for work in works:
                if work.state in UNDER_WAY:
                    self._fail(work, EncodeError("the encoder failed on this item"))
        self._pump_soon()


def _tell(work: Work, embedding: torch.Tensor, rows: int) -> None:
    """Of the one item of a batch some rows are there.

    Raises:
        RequestCancelledError: all requests for it are over.
    """
    if not work.holds:
        raise RequestCancelledError("all requests for it are over")
    work.partly = embedding, rows
    for hold in work.holds:
        hold.notice()


def _askers(works: Sequence[Work]) -> str:
    """Requests that wait for the first of them, as logs name them."""
    holds = (hold for work in works[:_SAID] for hold in work.holds[:_SAID])
    return ", ".join(dict.fromkeys(hold.asked_by for hold in holds if hold.asked_by))


def _said(error: Exception, work: Work) -> EpdError:
    """The askers' error; an unknown error's text goes to the log."""
    if isinstance(error, EpdError):
        return error
    logger.error("An item of %s failed", _askers([work]) or work.owner, exc_info=error)
    return EncodeError("the encoder failed on this item")
