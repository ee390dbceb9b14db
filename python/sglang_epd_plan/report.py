"""The report of a run: latencies, where the time went, and how busy the servers were."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from sglang_epd.profile import Profile
from sglang_epd.schema import Data, Rate
from sglang_epd_plan.records import Outcome, Request
from sglang_epd_plan.topology import Topology

if TYPE_CHECKING:
    from sglang_epd_plan.model import Deployment

# The parts of a request's time to first token; of its items the last to arrive counts.
STEPS = (
    "prepare",
    "memory",
    "encoder queue",
    "encode",
    "transfer",
    "prefill queue",
    "prefill",
    "hand over",
)


class Slo(Data, frozen=True):
    """Bounds that a share of all requests has to keep, each bound by itself.

    Attributes:
        ttft_s: on the time to first token.
        tpot_s: on a request's mean time per token after the first.
        quantile: the share.
    """

    ttft_s: Rate
    tpot_s: Rate
    quantile: Rate = 0.99

    def __post_init__(self) -> None:
        if self.quantile >= 1:
            raise ValueError("a quantile is below 1")
        if math.inf in (self.ttft_s, self.tpot_s):
            raise ValueError("a bound is a finite number of seconds")


@dataclass
class Report:
    """Requests that have ended, and the work of the servers.

    Attributes:
        outcomes: requests that have ended, by outcome.
        ttft, tpot, total: seconds of each request that was answered; tpot only of answers with
            more than one token.
        tokens: of all answers.
        prompts, cached: tokens of the prompts that were answered, and those of them that a
            prefix cache had.
        steps: seconds of each of `STEPS`, of each request that was answered.
        first_s, end_s: the first arrival, and the end of the last answer.
        busy: the share of time that servers worked: encode, prefill, decode, and the busiest
            network port.
        items: how often items were found in a cache, shared, refused and sent again.
    """

    profile: Profile
    topology: Topology
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    prompts: int = 0
    cached: int = 0
    steps: dict[str, array[float]] = field(
        default_factory=lambda: {step: array("d") for step in STEPS}
    )
    first_s: float = float("inf")
    end_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    items: Counter[str] = field(default_factory=Counter)

    def add(self, request: Request) -> None:
        """Count a request that has ended."""
        assert request.outcome is not None
        self.outcomes[request.outcome.value] += 1
        self.first_s = min(self.first_s, request.arrived)
        if request.outcome is not Outcome.DONE:
            return
        self.prompts += request.prompt
        self.cached += request.cached
        self.end_s = max(self.end_s, request.ended)
        self.ttft.append(request.first - request.arrived)
        self.total.append(request.ended - request.arrived)
        self.tokens += request.output
        if request.output > 1:
            self.tpot.append((request.ended - request.first) / (request.output - 1))
        for column, seconds in zip(self.steps.values(), _steps(request), strict=True):
            column.append(seconds)

    def close(self, run: Deployment) -> None:
        """Take the servers' work from a deployment whose run has ended."""
        now = run.env.now or 1.0
        encoders, prefills, decodes = run.encoders, run.prefills, run.decodes or run.prefills
        ports = [encoder.outward for encoder in encoders]
        ports += [
            port for server in (*prefills, *run.decodes) for port in (server.inward, server.outward)
        ]
        encode_s = [one.busy_s for one in encoders] or [one.encode_s for one in prefills]
        self.busy = {
            "encode": sum(encode_s) / now / len(encode_s),
            "prefill": sum(server.prefill_s for server in prefills) / now / len(prefills),
            "decode": sum(server.decode_s for server in decodes) / now / len(decodes),
            "network": max(port.busy_s for port in ports) / now,
        }
        for encoder in encoders:
            self.items["found"] += encoder.hits
            self.items["shared"] += encoder.shared
            self.items["refused"] += encoder.refused
        self.items["sent again"] = sum(dispatch.retries for dispatch in run.dispatches)

    def merge(self, other: Report) -> None:
        """Add another cell's report."""
        cells = self.topology.cells
        self.outcomes += other.outcomes
        for name in ("ttft", "tpot", "total"):
            getattr(self, name).extend(getattr(other, name))
        self.tokens += other.tokens
        self.prompts += other.prompts
        self.cached += other.cached
        for step in STEPS:
            self.steps[step].extend(other.steps[step])
        self.first_s = min(self.first_s, other.first_s)
        self.end_s = max(self.end_s, other.end_s)
        for name, share in other.busy.items():
            self.busy[name] = self.busy.get(name, 0.0) + share / cells
        self.items += other.items

    @property
    def counted(self) -> int:
        """Requests that have ended, with any outcome."""
        return self.outcomes.total()

    @property
    def throughput(self) -> float:
        """Answers a second from the first arrival to the last end, as in `sglang.bench_serving`."""
        seconds = self.end_s - self.first_s
        return len(self.ttft) / seconds if len(self.ttft) and seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float:
        """A quantile of `ttft`, `tpot` or `total`; requests that failed are infinitely late. 0 if
        there are no requests."""
        values = np.frombuffer(getattr(self, name)) if len(getattr(self, name)) else np.zeros(0)
        failed = self.counted - self.outcomes[Outcome.DONE.value]
        if failed:
            values = np.concatenate([values, np.full(failed, np.inf)])
        if not len(values):
            return 0.0
        return float(np.quantile(values, share, method="higher" if failed else "linear"))

    def mean(self, name: str) -> float:
        """The mean over requests that were answered; 0 if none was."""
        values = getattr(self, name)
        return sum(values) / len(values) if len(values) else 0.0

    def meets(self, slo: Slo) -> bool:
        """Whether enough requests kept each bound of the SLO."""
        return (
            self.counted > 0
            and self.quantile("ttft", slo.quantile) <= slo.ttft_s
            and self.quantile("tpot", slo.quantile) <= slo.tpot_s
        )

    def step_means(self, slowest: float = 1.0) -> dict[str, float]:
        """Mean seconds of each step, over the `slowest` share of requests by TTFT."""
        if not len(self.ttft):
            return dict.fromkeys(STEPS, 0.0)
        order = np.argsort(np.frombuffer(self.ttft))[::-1]
        chosen = order[: max(1, round(slowest * len(order)))]
        return {step: float(np.frombuffer(self.steps[step])[chosen].mean()) for step in STEPS}

    def summary(self, *also: float) -> dict[str, object]:
        """Plain data for people and files; times are in milliseconds.

        Args:
            also: quantiles beside the usual.
        """
        quantiles = sorted({0.5, 0.9, 0.99, *also})
        latencies = {
            f"{name}_ms": {
                "mean": _ms(self.mean(name)),
                **{f"p{100 * q:g}": _ms(self.quantile(name, q)) for q in quantiles},
            }
            for name in ("ttft", "tpot", "total")
        }
        return {
            "topology": self.topology.name,
            "policy": self.topology.policy,
            "gpus": self.topology.gpus(self.profile),
            "requests": self.counted,
            "outcomes": dict(self.outcomes),
            "requests_per_s": round(self.throughput, 4),
            "output_tokens_per_s": round(self.tokens * self.throughput / max(1, len(self.ttft)), 2),
            **latencies,
            "steps_mean_ms": {step: _ms(value) for step, value in self.step_means().items()},
            "busy": {name: round(share, 4) for name, share in self.busy.items()},
            "prefix_cache": round(self.cached / max(1, self.prompts), 4),
            "items": {name: count for name, count in self.items.items() if count},
        }


def _steps(request: Request) -> tuple[float, ...]:
    prefill = (
        request.prefill_begun - request.complete,
        request.prefill_ended - request.prefill_begun,
        request.first - request.prefill_ended,
    )
    last = max(request.items, key=attrgetter("received"), default=None)
    if last is None or not last.received:
        # The request has no media, or its prefill server encoded them.
        return (request.complete - request.arrived, 0.0, 0.0, 0.0, 0.0, *prefill)
    # An item from a cache has no times of its own, and an item that another request asked for
    # may have been prepared before this request arrived.
    media, reached = [], request.arrived
    for end in (last.prepared, last.granted, last.begun, last.encoded, last.received):
        if end > reached:
            media.append(end - reached)
            reached = end
        else:
            media.append(0.0)
    return (*media, *prefill)


def _ms(seconds: float) -> float | None:
    """Milliseconds; JSON has no infinity, which is None."""
    return round(1000 * seconds, 3) if seconds < float("inf") else None
