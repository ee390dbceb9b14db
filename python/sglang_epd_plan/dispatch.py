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
from sglang_epd.dispatch.pool import Health, Snapshot, View
from sglang_epd_plan.encoders import Encoder
from sglang_epd_plan.records import Item

# The interval of status reports, and how long a full encoder is left alone.
PROBE_S = 1.0
_RETRY_AFTER_S = 1.0


class Reports:
    """The last reports of encoders, all of one moment.

    Attributes:
        number: counts the rounds of reports.
        views: one per encoder; its load is the patches in its queue.
    """

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._encoders = encoders
        self.number = 0
        self.views = [View(encoder.url) for encoder in encoders]

    def renew(self) -> None:
        self.number += 1
        for number, (encoder, view) in enumerate(zip(self._encoders, self.views, strict=True)):
            # Most have not changed.
            if view.load != encoder.queued or view.rate != encoder.rate:
                self.views[number] = View(encoder.url, Health.READY, encoder.queued, encoder.rate)


class Dispatch:
    """Sends items to encoders, and sends them again if an encoder refuses them.

    Attributes:
        retries: items that were sent again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        encoders: Sequence[Encoder],
        reports: Reports,
        policy_name: str,
        rng: random.Random,
    ) -> None:
        self.retries = 0
        self._env = env
        self._encoders = encoders
        self._numbers = {encoder.url: number for number, encoder in enumerate(encoders)}
        self._reports = reports
        self._reports_read = 0
        self._policy = policy(policy_name)
        self._rng = rng
        self._budget = RetryBudget(lambda: env.now)
        self._turn = 0
        # By encoder, without zeros: patches that this server has outstanding there, and had when
        # the encoder reported last; and until when a full encoder is left alone.
        self._outstanding: dict[int, float] = {}
        self._reported: dict[int, float] = {}
        self._full_until: dict[int, float] = {}

    def send(self, items: Sequence[Item]) -> None:
        """Spread a request's items over the encoders."""
        self._budget.sent(len(items))
        self._spread(items)

    def settle(self, item: Item) -> None:
        """An encoder has answered for the item, or its request has ended."""
        self._read_reports()
        self._outstanding[item.encoder] -= item.patches

    def _read_reports(self) -> None:
        """Take the latest reports into account.

        Called before each change of `_outstanding`, so that its values are those at the moment of
        the reports."""
        if self._reports_read != self._reports.number:
            self._reports_read = self._reports.number
            self._outstanding = {n: patches for n, patches in self._outstanding.items() if patches}
            self._reported = self._outstanding.copy()

    def _usable(self) -> tuple[View, ...]:
        """Encoders that may be asked, with the loads that `dispatch.pool` would reckon: only where
        this server has sent something do they differ from the reports."""
        views = self._reports.views.copy()
        for number in self._outstanding.keys() | self._reported.keys():
            view = views[number]
            outstanding = self._outstanding.get(number, 0.0)
            load = max(outstanding, view.load + outstanding - self._reported.get(number, 0.0))
            views[number] = View(view.url, Health.READY, load, view.rate)
        if self._full_until:
            now = self._env.now
            self._full_until = {n: end for n, end in self._full_until.items() if end > now}
            views = [view for number, view in enumerate(views) if number not in self._full_until]
        return tuple(views)

    def _spread(self, items: Sequence[Item]) -> None:
        self._read_reports()
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
                self._outstanding[number] = self._outstanding.get(number, 0.0) + item.patches
            else:
                self._full_until[number] = self._env.now + _RETRY_AFTER_S
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
