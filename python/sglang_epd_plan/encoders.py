"""Encoder servers. Items are preprocessed, wait for the tower in the package's own fair queue,
and run in batches within its bounds. The package's own cache keeps embeddings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import simpy

from sglang_epd.encoder.pipeline.scheduling import BatchBounds, FairQueue, Job
from sglang_epd.profile import Profile
from sglang_epd_plan.records import Item
from sglang_epd_plan.transfer import Port, Threads

_INFINITE = float("inf")
# Batches that a tower has at a time: one waits behind the one that runs.
_DEPTH = 2
# The weight of the newest batch in an encoder's running rate.
_EMA = 0.1


class Encoder:
    """One encoder server.

    Attributes:
        url: its name in dispatch.
        items: in work, in any stage.
        queued: patches of those items that are not encoded yet.
        rate: patches a second, a running mean of its batches; 0 before the first.
        busy_s: time of its tower.
        hits, shared, refused: items from the cache, items that joined the same item in work,
            and items refused because the encoder was full.

    Args:
        grant: (item, then) calls `then` when the receiver has memory for the item.
        deliver: takes an item that has its embedding.
    """

    def __init__(
        self,
        env: simpy.Environment,
        url: str,
        profile: Profile,
        *,
        grant: Callable[[Item, Callable[[], None]], None],
        deliver: Callable[[Item], None],
    ) -> None:
        self.url = url
        self.outward = Port()
        self.rate = 0.0
        self.busy_s = 0.0
        self.hits = self.shared = self.refused = 0
        self._env = env
        self._costs = profile.encoder
        self._bytes_per_token = profile.links.bytes_per_token
        self._grant = grant
        self._deliver = deliver
        tower = self._costs.tower
        self._bounds = BatchBounds(tower.batch_patches, tower.batch_items)
        self.items, self.queued = 0, 0.0
        self._threads = Threads(self._costs.host.workers)
        self._queue: FairQueue[Job] = FairQueue()
        self._cache = _cache(self._costs.cache_mb << 20)
        # Jobs by the key of their items, of which the first is encoded for all.
        self._jobs: dict[bytes, Job] = {}
        self._preparing = 0
        # The tower's batches: the first runs.
        self._batches: deque[list[Job]] = deque()

    def ask(self, item: Item) -> bool:
        """Take an item in; False if the encoder is full."""
        if self.items >= self._costs.max_items:
            self.refused += 1
            return False
        self.items += 1
        request, now = item.request, self._env.now
        if (job := self._jobs.get(item.key)) is not None:
            self.shared += 1
            item.source = "coalesced"
            job.content.append(item)
            job.deadline = max(job.deadline, request.deadline)
        elif self._cache is not None and (entry := self._cache.find(item.key)) is not None:
            self._cache.release(entry)
            self.hits += 1
            item.source = "cached"
            self._after(self._costs.hit_s, partial(self._send, item))
        else:
            job = Job(request.number, item.patches, request.deadline, content=[item])
            self._jobs[item.key] = job
            item.source = "computed"
            self.queued += item.patches
            self._preparing += 1
            end = self._threads.end(now, self._costs.host.seconds(item.patches))
            self._after(end - now, partial(self._prepared, job))
        return True

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _event: then())

    def _prepared(self, job: Job) -> None:
        self._preparing -= 1
        job.content[0].prepared = self._env.now
        self._grant(job.content[0], partial(self._enqueue, job))

    def _enqueue(self, job: Job) -> None:
        job.content[0].granted = self._env.now
        self._queue.push(job)
        # Simultaneous arrivals may run together.
        self._after(0.0, self._hand_over)

    def _hand_over(self) -> None:
        """Give the tower its next batch. While one runs, the next waits until nothing is being
        prepared that might join it, or until it is full."""
        now = self._env.now
        for job in self._queue.take_expired(now) if len(self._queue) else ():
            # All requests that asked for it have ended: their items are dropped on delivery.
            self.queued -= job.cost
            self._hand_out(job)
        while len(self._batches) < _DEPTH and (not self._batches or self._complete()):
            batch = self._queue.take(
                now, self._bounds, self.rate, _INFINITE, ahead_s=self._ahead_s()
            )
            if not batch:
                return
            self._batches.append(batch)
            if len(self._batches) == 1:
                self._run()

    def _ahead_s(self) -> float:
        """Until the next batch has ended, beside the cost of a job in it."""
        running = sum(job.cost for batch in self._batches for job in batch)
        rest = min(self._bounds.patches, self._queue.cost)
        return (running + rest) / self.rate if self.rate else 0.0

    def _complete(self) -> bool:
        """Whether a batch of what is ready would have no more in it a little later."""
        if not self._preparing:
            return True
        ready = [job.cost for job in self._queue]
        return len(ready) >= self._bounds.items or sum(ready) >= self._bounds.patches

    def _run(self) -> None:
        """Begin the first batch."""
        batch = self._batches[0]
        for job in batch:
            job.content[0].begun = self._env.now
        seconds = self._costs.tower.seconds((job.cost, job.content[0].steps) for job in batch)
        self._after(seconds, partial(self._ran, batch, seconds))

    def _ran(self, batch: list[Job], seconds: float) -> None:
        self._batches.popleft()
        patches = sum(job.cost for job in batch)
        self.busy_s += seconds
        self.queued -= patches
        if seconds > 0:
            rate = patches / seconds
            self.rate = rate if not self.rate else self.rate + _EMA * (rate - self.rate)
        for job in batch:
            job.content[0].encoded = self._env.now
            if self._cache is not None:
                self._keep(job.content[0])
            self._hand_out(job)
        if self._batches:
            self._run()
        self._hand_over()

    def _hand_out(self, job: Job) -> None:
        """Send the embedding to all that asked for the item."""
        first = job.content[0]
        del self._jobs[first.key]
        for item in job.content:
            item.prepared, item.granted = first.prepared, first.granted
            item.begun, item.encoded = first.begun, first.encoded
            self._send(item)

    def _send(self, item: Item) -> None:
        self._grant(item, partial(self._sent, item))

    def _sent(self, item: Item) -> None:
        self.items -= 1
        self._deliver(item)

    def _keep(self, item: Item) -> None:
        if item.key in self._cache:
            return
        import torch

        from sglang_epd.wire.messages import Layout, TensorSpec

        # A tensor of the right size that takes no memory.
        nbytes = item.tokens * self._bytes_per_token
        embedding = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        layout = Layout("IMAGE", TensorSpec("uint8", (nbytes, 1)), [[1, 1, item.tokens]])
        self._cache.release(self._cache.add(item.key, layout, embedding))


def _cache(capacity_bytes: int) -> Any:
    """The package's cache, or None where nothing is kept: torch takes two seconds to import."""
    if not capacity_bytes:
        return None
    from sglang_epd.cache.embeddings import EmbeddingCache

    return EmbeddingCache(capacity_bytes)
