"""The highest rate at which an SLO holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_epd.errors import ConfigError
from sglang_epd_plan.model import Traffic
from sglang_epd_plan.profile import Profile
from sglang_epd_plan.records import Outcome, Request
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.run import simulate
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.workload import Closed, Workload


class Missed:
    """Ends a run as soon as it cannot meet its SLO any more, whatever else comes.

    Args:
        requests: how many there will be.
    """

    def __init__(self, slo: Slo, requests: int) -> None:
        self._slo = slo
        # One more, because a quantile lies between two values.
        self._allowed = (1 - slo.quantile) * requests + 1
        self._late = self._slow = 0

    def __call__(self, _report: Report, request: Request) -> bool:
        done = request.outcome is Outcome.DONE
        tokens = request.output - 1
        self._late += not done or request.first - request.arrived > self._slo.ttft_s
        self._slow += not done or request.ended - request.first > self._slo.tpot_s * tokens
        return max(self._late, self._slow) > self._allowed


@dataclass
class Try:
    """One rate that was tried."""

    rate: float
    holds: bool
    report: Report = field(repr=False)


@dataclass
class Goodput:
    """What `goodput` found.

    Attributes:
        rate: requests a second; 0 if the SLO does not hold at the lowest rate tried.
        tries: in the order in which they were made.
    """

    rate: float
    tries: list[Try]

    def last(self, holds: bool) -> Try | None:
        """The highest rate at which it held, or the lowest at which it did not."""
        found = [one for one in self.tries if one.holds is holds]
        best = max if holds else min
        return best(found, key=lambda one: one.rate) if found else None


def holds(
    profile: Profile,
    workload: Workload,
    topology: Topology,
    slo: Slo,
    rate: float,
    *,
    requests: int,
    seed: int = 0,
) -> Try:
    """Whether an SLO holds at a rate, for so many requests."""
    # Cells share the requests and each judges its own, so none may end the run for all.
    stop = Missed(slo, requests) if topology.cells == 1 else None
    traffic = Traffic(rate=rate, requests=requests)
    report = simulate(profile, workload, topology, traffic, seed=seed, stop=stop)
    enough = report.counted >= requests // topology.cells * topology.cells
    return Try(rate, enough and report.meets(slo), report)


def goodput(
    profile: Profile,
    workload: Workload,
    topology: Topology,
    slo: Slo,
    *,
    seconds: float = 600.0,
    least_requests: int = 500,
    most_requests: int = 20_000,
    seed: int = 0,
    tolerance: float = 0.02,
    start: float = 1.0,
) -> Goodput:
    """The highest rate that is sustained, by bisection.

    Each rate is held for `seconds`, so that a queue that grows has the time to show, within
    the bounds on requests.

    Args:
        tolerance: between the highest rate that holds and the lowest that does not.
        start: a rate to begin at.

    Raises:
        ConfigError: the workload is a closed loop, which has no rate.
    """
    if isinstance(workload.arrival, Closed):
        raise ConfigError("a closed loop has no rate to look for")
    if start <= 0 or not 0 < tolerance < 1:
        raise ConfigError("start has to be positive and tolerance between 0 and 1")
    tries: list[Try] = []

    def works(rate: float) -> bool:
        requests = round(min(max(rate * seconds, least_requests), most_requests))
        tries.append(holds(profile, workload, topology, slo, rate, requests=requests, seed=seed))
        return tries[-1].holds

    low, high = 0.0, math.inf
    rate = start
    while high == math.inf or low == 0.0:
        if works(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if high < start / 1000 or low > start * 1e6:
            break
    while low and (high - low) / high > tolerance:
        middle = (low * high) ** 0.5
        if works(middle):
            low = middle
        else:
            high = middle
    return Goodput(low, tries)
