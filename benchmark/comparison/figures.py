"""Figures of what was measured: plain functions of plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

NAN = float("nan")


class Outcome(msgspec.Struct, frozen=True):
    """What became of one request, or turn.

    Attributes:
        kind: "media" or "text"; of conversations "first" or "later".
        ttft_ms, tpot_ms: None where it failed, and the latter where it has one token.
        failure: why it did not get all of its tokens; empty where it did.
    """

    kind: str
    ttft_ms: float | None
    tpot_ms: float | None
    tokens: int
    failure: str = ""


class Run(msgspec.Struct, frozen=True):
    """One workload at one rate on one arm in one round.

    Attributes:
        rate: requests a second; 0 is one at a time.
        seconds: from the first request to the last answer.
        requests: digest of what was sent.
        command: of the client.
        probe: whether it is part of a search for goodput.
    """

    arm: str
    workload: str
    round: int
    rate: float
    seconds: float
    requests: str
    command: str
    outcomes: list[Outcome]
    probe: bool = False

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.failure]

    def ttfts_ms(self, kind: str = "") -> list[float]:
        return [o.ttft_ms for o in self.of(kind) if o.ttft_ms is not None]

    def tpots_ms(self, kind: str = "") -> list[float]:
        return [o.tpot_ms for o in self.of(kind) if o.tpot_ms is not None]

    def answers_ms(self) -> list[float]:
        """Until the last token of each."""
        return [
            one.ttft_ms + (one.tpot_ms or 0.0) * (one.tokens - 1)
            for one in self.outcomes
            if one.ttft_ms is not None
        ]

    def of(self, kind: str) -> list[Outcome]:
        """Of a kind; all if it is empty."""
        return [one for one in self.outcomes if kind in ("", one.kind)]

    @property
    def throughput(self) -> float:
        """Requests answered a second."""
        return (len(self.outcomes) - len(self.failed)) / self.seconds

    @property
    def token_rate(self) -> float:
        """Tokens of whole answers a second."""
        return sum(one.tokens for one in self.outcomes if not one.failure) / self.seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed; NaN of none.

    Raises:
        ValueError: `share` is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share}")
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else NAN


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else NAN


# What tables and plots show of times.
SHOWN: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "p50": lambda values: percentile(values, 0.5),
    "p99": lambda values: percentile(values, 0.99),
}


class Spread(msgspec.Struct, frozen=True):
    """Figures of several rounds."""

    median: float
    lowest: float
    highest: float
    rounds: int


def spread(values: Sequence[float]) -> Spread | None:
    """None of no finite value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return Spread(statistics.median(finite), min(finite), max(finite), len(finite))


def ratios(mine: dict[int, float], theirs: dict[int, float]) -> Spread | None:
    """Mine by theirs, each in its own round; None if they have no round in common."""
    return spread([mine[key] / theirs[key] for key in mine.keys() & theirs.keys() if theirs[key]])


class Limits(msgspec.Struct, frozen=True):
    """What p99 may be at most."""

    ttft_ms: float
    tpot_ms: float

    def hold(self, run: Run) -> bool:
        """Whether every request was answered, and in time."""
        p99 = SHOWN["p99"]
        return (
            not run.failed
            and p99(run.ttfts_ms()) <= self.ttft_ms
            # Answers of one token have none.
            and not p99(run.tpots_ms()) > self.tpot_ms
        )


class Goodput(msgspec.Struct, frozen=True):
    """The highest rate that holds, of those that were tried.

    Attributes:
        rate: 0 where the lowest did not hold.
        capped: the highest that may be tried holds: it is at least that.
        tried: each rate, and whether it held.
    """

    rate: float
    capped: bool
    tried: list[tuple[float, bool]]


class Bisection:
    """Looks for the highest rate that holds, by bisection of the rates' logarithms.

    Args:
        low, high: tried first; if `low` does not hold, or `high` does, nothing else is.
        probes: rates to try between them.

    Attributes:
        rate: to be tried next; None if it has come to its end.
    """

    def __init__(self, low: float, high: float, probes: int) -> None:
        self._good, self._bad, self._probes = 0.0, high, probes
        self._high = high
        self._tried: list[tuple[float, bool]] = []
        self.rate: float | None = low

    def tell(self, held: bool) -> None:
        """Whether `rate` held; it is another one then."""
        rate = self.rate
        assert rate is not None
        self._tried.append((rate, held))
        if held:
            self._good = rate
        else:
            self._bad = rate
        ended = not self._good or self._good == self._high
        if len(self._tried) == 1:
            self.rate = None if ended else self._high
        elif ended or len(self._tried) >= 2 + self._probes:
            self.rate = None
        else:
            self.rate = round(math.sqrt(self._good * self._bad), 3)

    @property
    def found(self) -> Goodput:
        return Goodput(self._good, self._good == self._high, self._tried)
