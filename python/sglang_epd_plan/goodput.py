"""Goodput: the highest rate at which an SLO holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_epd.errors import ConfigError
from sglang_epd.profile import Profile
from sglang_epd_plan.model import simulate
from sglang_epd_plan.records import Outcome, Request
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.workload import Closed, Traffic, Workload

# Between the highest rate that holds and the lowest that does not.
_TOLERANCE = 0.02


class Missed:
    """Ends a run as soon as too many requests have missed the SLO.

    Args:
        requests: of the whole run.
    """

    def __init__(self, slo: Slo, requests: int) -> None:
        self._slo = slo
        # One more, because a quantile lies between two values.
        self._allowed = (1 - slo.quantile) * requests + 1
        self._late = self._slow = 0

    def __call__(self, request: Request) -> bool:
        done = request.outcome is Outcome.DONE
        tokens = request.output - 1
        self._late += not done or request.first - request.arrived > self._slo.ttft_s
        self._slow += not done or request.ended - request.first > self._slo.tpot_s * tokens
        return max(self._late, self._slow) > self._allowed


@dataclass
class Trial:
    """A run at one rate."""

    rate: float
    holds: bool
    report: Report = field(repr=False)


@dataclass
class Goodput:
    """The result of `goodput`.

    Attributes:
        rate: requests a second; 0 if the SLO does not hold at the lowest rate.
        trials: in the order of the search.
    """

    rate: float
    trials: list[Trial]

    def last(self, holds: bool) -> Trial | None:
        """The highest rate that held, or the lowest that did not."""
        found = [one for one in self.trials if one.holds is holds]
        best = max if holds else min
        return best(found, key=lambda one: one.rate) if found else None


def trial(
    profile: Profile,
    workload: Workload,
    topology: Topology,
    slo: Slo,
    rate: float,
    *,
    requests: int,
    seed: int,
) -> Trial:
    """Whether the SLO holds at a rate, for a number of requests to one cell."""
    traffic = Traffic(rate=rate, requests=requests)
    stop = Missed(slo, requests)
    report = simulate(profile, workload, topology, traffic, seed=seed, stop=stop)
    return Trial(rate, report.counted >= requests and report.meets(slo), report)


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
    start: float = 1.0,
) -> Goodput:
    """Search the highest rate at which the SLO holds, by bisection.

    Args:
        topology: of one cell.
        seconds: how long each rate is held, so that a slowly growing queue shows; within the
            bounds on requests.
        start: the first rate.

    Raises:
        ConfigError: the workload is a closed loop, which has no rate.
    """
    if isinstance(workload.arrival, Closed):
        raise ConfigError("a closed loop has no rate to look for")
    trials: list[Trial] = []

    def holds(rate: float) -> bool:
        requests = round(min(max(rate * seconds, least_requests), most_requests))
        trials.append(trial(profile, workload, topology, slo, rate, requests=requests, seed=seed))
        return trials[-1].holds

    low, high = 0.0, math.inf
    rate = start
    while high == math.inf or low == 0.0:
        if holds(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if high < start / 1000 or low > start * 1e6:
            break
    while low and (high - low) / high > _TOLERANCE:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return Goodput(low, trials)
