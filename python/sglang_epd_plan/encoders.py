"""Encoder servers: items are prepared, wait for the tower in the package's own fair queue,
and run in batches by its bounds. What is kept is in the package's own cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import simpy

from sglang_epd.encoder.scheduling import Bounds, FairQueue, Job
from sglang_epd_plan.profile import Profile
from sglang_epd_plan.records import Item
from sglang_epd_plan.transfer import Port, Workers

_INFINITE = float("inf")
# The weight of a batch in an encoder's running rate.
_EMA = 0.1


class Encoder:
    """One encoder server.

    Attributes:
        url: its name to the policies.
        items: in work, whatever stage they are in.
        queued: patches of theirs that are not encoded.
        rate: patches a second, as it has seen itself do; 0 before its first batch.
        alive: it answers.
        busy_s, computed, hits, shared, refused: its tower's work, and how items fared.

    Args:
        grant: (item, then) calls `then` when there is memory for the item where it goes.
        deliver: takes an item whose embedding is here.
        lose: takes items that were in work when the encoder died.
    """

    def __init__(
        self,
        env: simpy.Environment,
        url: str,
        profile: Profile,
        *,
        grant: Callable[[Item, Callable[[], None]], None],
        deliver: Callable[[Item], None],
        lose: Callable[[list[Item]], None],
    ) -> None:
        self.url = url
        self.out = Port()
        self.items = 0
        self.queued = 0.0
        self.rate = 0.0
        self.alive = True
        self.busy_s = self.computed = 0.0
        self.batches = self.hits = self.shared = self.refused = 0
        self._env = env
        self._costs = profile.encoder
        self._links = profile.links
        self._grant = grant
        self._deliver = deliver
        self._lose = lose
        tower = self._costs.tower
        self._bounds = Bounds(tower.batch_patches, tower.batch_items)
        self._workers = Workers(self._costs.host.workers)
        self._queue = FairQueue()
        self._cache = _cache(self._costs.cache_mb << 20)
        # Items by key: the first is encoded, for all of them.
        self._making: dict[bytes, list[Item]] = {}
        self._found: dict[Item, None] = {}
        self._life = 0
        self._asleep = True

    def ask(self, item: Item) -> bool:
        """Take an item in; False if it has as many as it takes."""
        if self.items >= self._costs.max_items:
            self.refused += 1
            return False
        self.items += 1
        if item.key in self._making:
            self.shared += 1
            self._making[item.key].append(item)
            return True
        if self._cache is not None and (entry := self._cache.find(item.key)) is not None:
            self._cache.release(entry)
            self.hits += 1
            self._found[item] = None
            self._later(self._costs.hit_s, partial(self._grant_and_deliver, item))
            return True
        self._making[item.key] = [item]
        self.queued += item.patches
        host = self._costs.host
        end = self._workers.end(self._env.now, host.item_s + item.patches * host.patch_s)
        self._later(end - self._env.now, partial(self._prepared, item))
        return True

    def die(self) -> None:
        """All that is in work is lost, and what was kept."""
        lost = [item for items in self._making.values() for item in items] + list(self._found)
        self._life += 1
        self.alive = False
        self.items, self.queued = 0, 0.0
        self._making.clear()
        self._found.clear()
        self._queue = FairQueue()
        self._workers = Workers(self._costs.host.workers)
        self._cache = _cache(self._costs.cache_mb << 20)
        self._lose(lost)

    def revive(self) -> None:
        self.alive = True

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        """Unless the encoder dies meanwhile."""
        life = self._life

        def go_on(_event: simpy.Event) -> None:
            if life == self._life:
                then()

        self._env.timeout(seconds).callbacks.append(go_on)

    def _prepared(self, item: Item) -> None:
        item.prepared = self._env.now
        life = self._life

        def granted() -> None:
            if life != self._life:
                return
            item.granted = self._env.now
            self._queue.push(
                Job(item.request.number, item.patches, item.request.deadline, content=item)
            )
            if self._asleep:
                self._asleep = False
                # After all that happens now: what comes together may run together.
                self._env.timeout(0.0).callbacks.append(self._run)

        self._grant(item, granted)

    def _run(self, _event: simpy.Event | None = None) -> None:
        """The next batch, if anything waits."""
        now = self._env.now
        for job in self._queue.take_expired(now) if len(self._queue) else ():
            self._gone(job.content)
        batch = self._queue.take(now, self._bounds, self.rate, _INFINITE)
        if not batch:
            self._asleep = True
            return
        for job in batch:
            job.content.begun = now
        seconds = self._costs.tower.seconds(job.cost for job in batch)
        ran = partial(self._ran, batch, seconds, self._life)
        self._env.timeout(seconds).callbacks.append(ran)

    def _ran(self, batch: list[Job], seconds: float, life: int, _event: simpy.Event) -> None:
        # Of one that died meanwhile nothing is left.
        if life == self._life:
            self._count(batch, seconds)
            self._hand_out(batch)
        self._run()

    def _count(self, batch: list[Job], seconds: float) -> None:
        patches = sum(job.cost for job in batch)
        self.batches += 1
        self.busy_s += seconds
        self.computed += patches
        self.queued -= patches
        if seconds > 0:
            rate = patches / seconds
            self.rate = rate if not self.rate else self.rate + _EMA * (rate - self.rate)

    def _hand_out(self, batch: list[Job]) -> None:
        for job in batch:
            item: Item = job.content
            if self._cache is not None:
                self._keep(item)
            for asker in self._making.pop(item.key):
                asker.prepared, asker.granted = item.prepared, item.granted
                asker.begun, asker.encoded = item.begun, self._env.now
                self._found[asker] = None
                self._grant_and_deliver(asker)

    def _gone(self, item: Item) -> None:
        """Nobody waits for it any more."""
        self.queued -= item.patches
        for asker in self._making.pop(item.key):
            self._found[asker] = None
            self._grant_and_deliver(asker)

    def _grant_and_deliver(self, item: Item) -> None:
        life = self._life

        def go_on() -> None:
            if life == self._life:
                del self._found[item]
                self.items -= 1
                self._deliver(item)

        self._grant(item, go_on)

    def _keep(self, item: Item) -> None:
        if item.key in self._cache:
            return
        import torch

        from sglang_epd.wire import Layout, TensorSpec

        # Of the right size, and in no memory.
        nbytes = item.tokens * self._links.bytes_per_token
        embedding = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        layout = Layout("IMAGE", TensorSpec("uint8", (nbytes, 1)), [[1, 1, item.tokens]])
        self._cache.release(self._cache.add(item.key, layout, embedding))


def _cache(capacity_bytes: int) -> Any:
    """The package's cache, or None where nothing is kept: it brings torch along, two
    seconds of start-up."""
    if not capacity_bytes:
        return None
    from sglang_epd.cache.embeddings import EmbeddingCache

    return EmbeddingCache(capacity_bytes)
