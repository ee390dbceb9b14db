"""What came out of a run: latencies, where the time went, and what was busy."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang_epd_plan.profile import Profile
from sglang_epd_plan.records import Item, Outcome, Request
from sglang_epd_plan.schema import Data, Rate
from sglang_epd_plan.topology import Topology

if TYPE_CHECKING:
    from sglang_epd_plan.dispatch import Dispatch
    from sglang_epd_plan.encoders import Encoder
    from sglang_epd_plan.language import Server
    from sglang_epd_plan.transfer import Arena

# Whether a run may end early, asked after each request.
StopWhen = Callable[["Report", Request], bool]

# What a request's time to its first token is made of; its last item to land stands for all.
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
    """What has to hold for that share of all requests, each for itself.

    Attributes:
        ttft_s: until the first token.
        tpot_s: a request's mean time a token after it.
    """

    ttft_s: Rate
    tpot_s: Rate
    quantile: Rate = 0.99

    def __post_init__(self) -> None:
        if self.quantile >= 1:
            raise ValueError("a quantile is below 1")


@dataclass
class Report:
    """Requests that have ended, and what the servers did.

    Attributes:
        ttft, tpot, total: seconds of each request that was answered; tpot of those with more
            than one token.
        tokens: they were answered with.
        prompts, covered: tokens of their prompts, and those found in a prefix cache.
        steps: seconds of each step of `STEPS`, of each of them.
        arrived: requests, warm-up included.
        end_s: of the last one.
        busy: share of the time that servers of each kind of work were at it: encode,
            prefill, decode, and the busiest network port.
        encoded: patches that each encoder has computed.
    """

    profile: Profile
    topology: Topology
    arrived: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    prompts: int = 0
    covered: int = 0
    steps: dict[str, array[float]] = field(
        default_factory=lambda: {step: array("d") for step in STEPS}
    )
    first_s: float = float("inf")
    end_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    encoded: list[float] = field(default_factory=list)
    items: Counter[str] = field(default_factory=Counter)
    grant_wait_s: float = 0.0

    def add(self, request: Request) -> None:
        """One that is over."""
        assert request.outcome is not None
        self.outcomes[request.outcome.value] += 1
        self.first_s = min(self.first_s, request.arrived)
        if request.outcome is not Outcome.DONE:
            return
        self.prompts += request.prompt
        self.covered += request.covered
        self.end_s = max(self.end_s, request.ended)
        self.ttft.append(request.first - request.arrived)
        self.total.append(request.ended - request.arrived)
        self.tokens += request.output
        if request.output > 1:
            self.tpot.append((request.ended - request.first) / (request.output - 1))
        for column, seconds in zip(self.steps.values(), _steps(request), strict=True):
            column.append(seconds)

    def close(
        self,
        now: float,
        *,
        encoders: Sequence[Encoder],
        prefills: Sequence[Server],
        decodes: Sequence[Server],
        arenas: Sequence[Arena],
        dispatches: Sequence[Dispatch],
    ) -> None:
        """The run is over: what the servers have done."""
        now = now or 1.0
        language = [*prefills, *decodes]
        self.encoded = [encoder.computed for encoder in encoders]
        ports = [encoder.out for encoder in encoders]
        ports += [port for server in language for port in (server.inward, server.outward)]
        encode = sum(encoder.busy_s for encoder in encoders) or sum(
            server.encode_s for server in prefills
        )
        self.busy = {
            "encode": encode / now / (len(encoders) or len(prefills)),
            "prefill": sum(server.prefilling_s(now) for server in prefills) / now / len(prefills),
            "decode": sum(server.decode_s for server in decodes or prefills)
            / now
            / len(decodes or prefills),
            "network": max(port.busy_s for port in ports) / now,
        }
        for encoder in encoders:
            self.items["found"] += encoder.hits
            self.items["shared"] += encoder.shared
            self.items["refused"] += encoder.refused
        self.items["sent again"] = sum(dispatch.retries for dispatch in dispatches)
        self.grant_wait_s = sum(arena.waited_s for arena in arenas)

    def merge(self, other: Report) -> None:
        """Another cell's, of the same size and time."""
        cells = self.topology.cells
        self.arrived += other.arrived
        self.outcomes += other.outcomes
        for name in ("ttft", "tpot", "total"):
            getattr(self, name).extend(getattr(other, name))
        self.tokens += other.tokens
        self.prompts += other.prompts
        self.covered += other.covered
        for step in STEPS:
            self.steps[step].extend(other.steps[step])
        self.first_s = min(self.first_s, other.first_s)
        self.end_s = max(self.end_s, other.end_s)
        for name, share in other.busy.items():
            self.busy[name] = self.busy.get(name, 0.0) + share / cells
        self.encoded += other.encoded
        self.items += other.items
        self.grant_wait_s += other.grant_wait_s

    @property
    def counted(self) -> int:
        """Requests that have ended, however."""
        return self.outcomes.total()

    @property
    def throughput(self) -> float:
        """Answered requests a second, from the first one's arrival to the last one's end, as
        `sglang.bench_serving` reckons it."""
        seconds = self.end_s - self.first_s
        return len(self.ttft) / seconds if len(self.ttft) and seconds > 0 else 0.0

    def quantile(self, name: str, share: float) -> float:
        """Of `ttft`, `tpot` or `total`, with those who failed as infinitely late; 0 where
        there are none."""
        values = np.frombuffer(getattr(self, name)) if len(getattr(self, name)) else np.zeros(0)
        failed = self.counted - self.outcomes[Outcome.DONE.value]
        if failed:
            values = np.concatenate([values, np.full(failed, np.inf)])
        if not len(values):
            return 0.0
        return float(np.quantile(values, share, method="higher" if failed else "linear"))

    def mean(self, name: str) -> float:
        """Of those that were answered; 0 where none was."""
        values = getattr(self, name)
        return sum(values) / len(values) if len(values) else 0.0

    def meets(self, slo: Slo) -> bool:
        """Whether as many requests as the SLO says were in time for each of its parts."""
        return (
            self.counted > 0
            and self.quantile("ttft", slo.quantile) <= slo.ttft_s
            and self.quantile("tpot", slo.quantile) <= slo.tpot_s
        )

    def step_means(self, slowest: float = 1.0) -> dict[str, float]:
        """Mean seconds of each step, of that share of requests whose first token came last."""
        if not len(self.ttft):
            return dict.fromkeys(STEPS, 0.0)
        order = np.argsort(np.frombuffer(self.ttft))[::-1]
        chosen = order[: max(1, round(slowest * len(order)))]
        return {step: float(np.frombuffer(self.steps[step])[chosen].mean()) for step in STEPS}

    def summary(self) -> dict[str, object]:
        """Plain data, for people and files; times in milliseconds."""
        latencies = {
            f"{name}_ms": {
                "mean": _ms(self.mean(name)),
                **{f"p{round(100 * q)}": _ms(self.quantile(name, q)) for q in (0.5, 0.9, 0.99)},
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
            "prefix_cache": round(self.covered / max(1, self.prompts), 4),
            "items": {name: count for name, count in self.items.items() if count},
        }


def _steps(request: Request) -> tuple[float, ...]:
    prefill = (
        request.began - request.landed,
        request.prefill_ended - request.began,
        request.first - request.prefill_ended,
    )
    items = request.items
    last = items[0] if len(items) == 1 else max(items, key=_landed, default=None)
    if last is None or not last.landed:
        # Without media, or encoded where it is prefilled.
        return (request.landed - request.arrived, 0.0, 0.0, 0.0, 0.0, *prefill)
    # What was found in a cache was not encoded for it, and what another request has asked
    # for was prepared before it came.
    media, reached = [], request.arrived
    for end in (last.prepared, last.granted, last.begun, last.encoded, last.landed):
        if end > reached:
            media.append(end - reached)
            reached = end
        else:
            media.append(0.0)
    return (*media, *prefill)


def _landed(item: Item) -> float:
    return item.landed


def _ms(seconds: float) -> float | None:
    """Infinity is no JSON."""
    return round(1000 * seconds, 3) if seconds < float("inf") else None
