"""One language server's view of the encoders, and where it sends what.

The policy and the retry budget are the package's own, and so are the snapshots they are
given. `dispatch.pool` itself is not used, because it wakes tasks of an event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import simpy

from sglang_epd.dispatch.policies import Work, policy
from sglang_epd.dispatch.pool import Snapshot, State, View
from sglang_epd.dispatch.retries import RetryBudget, pause
from sglang_epd.sim.encoders import Encoder
from sglang_epd.sim.records import Item

# How often encoders are asked how they are, when one that is silent is given up, and how long
# one that is full is left alone.
PROBE_S = 1.0
SILENT_S = 2.0
_RETRY_AFTER_S = 1.0


class Reports:
    """What encoders said when they were last asked, all at the same time.

    Attributes:
        number: how often they were.
        latest: whether each answered, the patches in its queue, and its rate.
    """

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self.number = 0
        self.latest = [(True, 0.0, 0.0)] * len(encoders)

    def renew(self) -> None:
        self.number += 1
        self.latest = [(one.alive, one.queued, one.rate) for one in self._encoders]


class Dispatch:
    """Sends items to encoders, again where they were refused or lost.

    Attributes:
        retries: items that were sent again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        encoders: Sequence[Encoder],
        reports: Reports,
        name: str,
        rng: random.Random,
    ) -> None:
        self.retries = 0
        self._reports = reports
        self._heard = 0
        self._env = env
        self._encoders = encoders
        self._numbers = {encoder.url: number for number, encoder in enumerate(encoders)}
        self._policy = policy(name)
        self._rng = rng
        self._budget = RetryBudget(lambda: env.now)
        self._turn = 0
        # What this server has sent there and not heard of; and so at the last report.
        self._outstanding = [0.0] * len(encoders)
        # Patches that this server had there when the encoder last told of its queue.
        self._reported = [0.0] * len(encoders)
        self._busy_until = [0.0] * len(encoders)
        self._views = [View(encoder.url) for encoder in encoders]

    def send(self, items: Sequence[Item]) -> None:
        """Spread a request's items."""
        self._budget.sent(len(items))
        self._spread(items)

    def landed(self, item: Item) -> None:
        """An encoder has answered for an item."""
        self._hear()
        self._outstanding[item.encoder] -= item.patches

    def lost(self, item: Item) -> None:
        """The encoder that has it is dead: found out when it is silent."""
        self.landed(item)
        self._again(item, SILENT_S)

    def _hear(self) -> None:
        """Take note of the latest reports. What this server had outstanding when they were
        made is what it has now: it calls this before that changes."""
        if self._heard != self._reports.number:
            self._heard = self._reports.number
            self._reported = self._outstanding.copy()

    def _usable(self) -> tuple[View, ...]:
        """Encoders that may be asked, with the loads that `dispatch.pool` would reckon."""
        now, usable = self._env.now, []
        for number, (alive, queued, rate) in enumerate(self._reports.latest):
            if not alive or self._busy_until[number] > now:
                continue
            outstanding = self._outstanding[number]
            load = max(outstanding, queued + outstanding - self._reported[number])
            view = self._views[number]
            # Most are as they were when this server looked last.
            if view.load != load or view.rate != rate:
                view = self._views[number] = View(view.url, State.READY, load, rate)
            usable.append(view)
        return tuple(usable)

    def _spread(self, items: Sequence[Item]) -> None:
        self._hear()
        views = self._usable()
        if not views:
            for item in items:
                self._again(item, _RETRY_AFTER_S)
            return
        works = [Work(item.key, item.patches) for item in items]
        urls = self._policy(works, Snapshot(views, self._turn), self._rng)
        self._turn += len(items)
        for item, url in zip(items, urls, strict=True):
            number = self._numbers[url]
            encoder = self._encoders[number]
            if not encoder.alive:
                self._again(item, SILENT_S)
            elif encoder.ask(item):
                item.encoder = number
                self._outstanding[number] += item.patches
            else:
                self._busy_until[number] = self._env.now + _RETRY_AFTER_S
                self._again(item, 0.0)

    def _again(self, item: Item, seconds: float) -> None:
        if item.request.outcome is not None:
            return
        item.tries += 1
        self.retries += 1
        wait = seconds + self._budget.take(1) + pause(item.tries, self._rng)
        self._env.timeout(wait).callbacks.append(partial(self._retry, item))

    def _retry(self, item: Item, _event: simpy.Event) -> None:
        if item.request.outcome is None:
            self._spread([item])
