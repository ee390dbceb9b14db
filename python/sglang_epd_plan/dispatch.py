"""One language server's view of the encoders, and where it sends items.

The policy, the retry budget and the snapshots are the package's own. `dispatch.pool` itself is
not used, because it wakes tasks of an event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import simpy

from sglang_epd.dispatch.policies import ItemCost, RetryBudget, pause, policy
from sglang_epd.dispatch.pool import Snapshot, View
from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.records import Item

# The interval of status reports, and how long a full encoder is left alone.
PROBE_S = 1.0
_RETRY_AFTER_S = 1.0


class Dispatch:
    """Sends items to encoders, and sends them again if an encoder refuses them.

    Attributes:
        retries: items that were sent again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        encoders: Sequence[Encoder],
        policy_name: str,
        rng: random.Random,
    ) -> None:
        self.retries = 0
        self._env = env
        self._encoders = encoders
        self._numbers = {encoder.url: number for number, encoder in enumerate(encoders)}
        self._policy = policy(policy_name)
        self._rng = rng
        self._budget = RetryBudget(lambda: env.now)
        self._turn = 0
        self._views = [View(encoder.url) for encoder in encoders]
        # By encoder: patches that this server has outstanding there, and had when the encoder
        # reported last; and until when it is left alone because it was full.
        self._outstanding = [0.0] * len(encoders)
        self._reported = self._outstanding.copy()
        self._full_until = self._outstanding.copy()

    def send(self, items: Sequence[Item]) -> None:
        """Spread a request's items over the encoders."""
        self._budget.sent(len(items))
        self._spread(items)

    def settle(self, item: Item) -> None:
        """An encoder has answered for the item, or its request has ended."""
        self._outstanding[item.encoder] -= item.patches
        if item.received:
            self._policy.heard(item.key, item.source)

    def hear(self, views: list[View]) -> None:
        """Take the reports of all encoders; their loads are the patches in their queues."""
        self._views = views
        self._reported = self._outstanding.copy()

    def _usable(self) -> tuple[View, ...]:
        """Encoders that may be asked, with the loads that `dispatch.pool` would reckon."""
        columns = (self._views, self._outstanding, self._reported, self._full_until)
        return tuple(
            View(view.url, view.state, max(mine, view.load + mine - reported), view.rate)
            for view, mine, reported, full_until in zip(*columns, strict=True)
            if full_until <= self._env.now
        )

    def _spread(self, items: Sequence[Item]) -> None:
        views = self._usable()
        if not views:
            for item in items:
                self._again(item, _RETRY_AFTER_S)
            return
        works = [ItemCost(item.key, item.patches) for item in items]
        urls = self._policy(works, Snapshot(views, self._turn), self._rng)
        self._turn += len(items)
        for item, url in zip(items, urls, strict=True):
            number = self._numbers[url]
            encoder = self._encoders[number]
            if encoder.ask(item):
                item.encoder = number
                self._outstanding[number] += item.patches
            else:
                self._full_until[number] = self._env.now + _RETRY_AFTER_S
                self._again(item, 0.0)

    def _again(self, item: Item, seconds: float) -> None:
        if item.request.outcome is not None:
            return
        item.tries += 1
        self.retries += 1
        left = item.request.deadline - self._env.now
        wait = seconds + self._budget.take(1, left) + pause(item.tries, self._rng)
        self._env.timeout(wait).callbacks.append(partial(self._retry, item))

    def _retry(self, item: Item, _event: simpy.Event) -> None:
        if item.request.outcome is None:
            self._spread([item])
