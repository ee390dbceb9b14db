"""The loads of `validate_emulated.py`, and what the simulation says of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_epd.profile import HostCosts, Profile
from sglang_epd.schema import convert, load
from sglang_epd_plan.goodput import goodput
from sglang_epd_plan.language import Server
from sglang_epd_plan.model import Deployment
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic, Workload

# Of dispatch: with `affinity` the content of a picture would choose its encoder, which is chance.
POLICY = "round_robin"
PROFILE = Path(__file__).parent / "simulated" / "h100-by-8.json"
_SMALL, _LARGE = {"width": 224, "height": 224}, {"width": 448, "height": 448}
replace = msgspec.structs.replace


def _kind(**changes: Any) -> dict[str, Any]:
    return {"text_tokens": 60, "output_tokens": 24, "items": 1, "pictures": [_LARGE], **changes}


_ONE = [_kind()]
_MIXED = [_kind(weight=3, items=0, pictures=[], output_tokens=48), _kind(items=2)]
_SIZED = [_kind(items={"kind": "uniform", "low": 1, "high": 3}, pictures=[_SMALL, _LARGE])]
_MANY = [_kind(items={"kind": "uniform", "low": 3, "high": 8}, output_tokens=12)]
# Of the SLO: as many times as long as a picture and a step by themselves, for a share of the
# requests; p99 of so few would be the slowest.
_SLO_TTFT, _SLO_TPOT, _SLO_QUANTILE = 3.0, 5.0, 0.9
_POISSON = {"kind": "poisson"}
_BURSTS = {"kind": "gamma", "cv": 2.0}


@dataclass(frozen=True)
class Case:
    """A load: requests a second of the emulated machines, or users of a closed loop."""

    name: str
    topology: str
    kinds: list[dict[str, Any]]
    rate: float = 0.0
    users: int = 0
    bursts: bool = False

    def workload(self) -> Workload:
        arrival: dict[str, Any] = _BURSTS if self.bursts else _POISSON
        if self.users:
            arrival = {"kind": "closed", "users": self.users}
        asked = {"name": self.name, "kinds": self.kinds, "arrival": arrival}
        return convert(asked, Workload, self.name)

    @property
    def told(self) -> tuple[str, str, str]:
        return self.topology, self.name, self.load

    @property
    def load(self) -> str:
        how = f"{self.users} users" if self.users else f"{self.rate:g} requests/s"
        return f"{how}, in bursts" if self.bursts else how


CASES = (
    Case("one picture", "1EPD", _ONE, rate=5.0),
    Case("one in four with 2 pictures", "1EPD", _MIXED, rate=7.0),
    Case("3 to 8 pictures", "1EPD", _MANY, users=3),
    Case("one picture", "2EPD", _ONE, rate=12.0, bursts=True),
    Case("1 to 3 pictures of two sizes", "2EPD", _SIZED, users=8),
    Case("one picture", "1E1PD", _ONE, rate=9.0),
    Case("one in four with 2 pictures", "1E1PD", _MIXED, rate=9.0),
    Case("3 to 8 pictures", "1E1PD", _MANY, rate=2.5),
    Case("one picture", "2E1PD", _ONE, rate=12.0, bursts=True),
    Case("1 to 3 pictures of two sizes", "2E1PD", _SIZED, users=6),
    Case("1 to 3 pictures of two sizes", "2E2PD", _SIZED, rate=12.0),
    Case("one in four with 2 pictures", "2E2PD", _MIXED, rate=16.0),
    Case("one picture", "1E1P1D", _ONE, rate=9.0),
    Case("one in four with 2 pictures", "1E1P1D", _MIXED, rate=9.0),
    Case("3 to 8 pictures", "1E1P1D", _MANY, rate=2.5),
)


@dataclass(frozen=True)
class Host:
    """What single requests to idle servers take beside their passes, in the emulated machines'
    time: a text, and how much more for a picture of each size; a step. One picture is ready after
    the other: two that were ready at the same moment would share a pass, and real ones never are.
    """

    request_s: float
    small_s: float
    large_s: float
    step_s: float

    def on(self, profile: Profile) -> Profile:
        """The profile with them."""
        patch_s = max(0.0, (self.large_s - self.small_s) / (1024 - 256))
        item_s = max(0.0, self.large_s - 1024 * patch_s)
        host = HostCosts(item_s=item_s, patch_s=patch_s)
        return replace(
            profile,
            encoder=replace(profile.encoder, host=host),
            language=replace(
                profile.language,
                host=host,
                request_s=self.request_s,
                decode_launch_s=profile.language.decode_launch_s + self.step_s,
            ),
        )


def figures(ttft: Sequence[float], tpot: Sequence[float], rate: float) -> dict[str, float]:
    return {
        "requests_per_s": rate,
        **{
            f"{name}_{quantile}_s": float(np.quantile(values, share))
            for name, values in (("ttft", ttft), ("tpot", tpot))
            for quantile, share in (("p50", 0.5), ("p99", 0.99))
        },
        "ttft_mean_s": statistics.fmean(ttft),
        "tpot_mean_s": statistics.fmean(tpot),
    }


def worked(run: Report) -> dict[str, float]:
    """Seconds of all simulated accelerators by kind."""
    topology = run.topology
    prefills = topology.prefills
    servers = {
        "tower": ("encode", topology.encoders or prefills),
        "prefill": ("prefill", prefills),
        "decode": ("decode", topology.decodes or prefills),
    }
    return {kind: run.busy[name] * run.end_s * count for kind, (name, count) in servers.items()}


class Replayed(Deployment):
    """Requests go to the servers that real ones were sent to: of equal servers a few milliseconds
    decide, and all later requests differ."""

    routes: Iterator[str] = iter("")

    def _route(self, servers: list[Server]) -> int:
        sent = next(self.routes, None) if servers is self.prefills else None
        return super()._route(servers) if sent is None else int(sent)


def predict(
    profile: Profile, case: Case, requests: int, routes: str = ""
) -> tuple[Report, dict[str, float]]:
    """What the simulation says of a load.

    Args:
        routes: the number of the server of each request, if they are known.
    """
    topology = parse(case.topology, policy=POLICY)
    traffic = Traffic(rate=case.rate, requests=requests)
    deployment = Replayed(profile, case.workload(), topology, traffic)
    deployment.routes = iter(routes)
    run = deployment.run()
    return run, figures(run.ttft, run.tpot, run.throughput)


def again(one: dict[str, Any]) -> dict[str, Any]:
    """A load that was measured, with what the simulation says of it now."""
    case = next(case for case in CASES if case.told == told(one))
    profile = Host(**one["host"]).on(load(PROFILE, Profile))
    run, predicted = predict(profile, case, one["requests"], one.get("routes", ""))
    return {**one, "predicted": predicted, "predicted_s": worked(run)}


def told(one: dict[str, Any]) -> tuple[str, str, str]:
    """Of which load a kept outcome is."""
    return one["topology"], one["case"], one["load"]


def sought(topology: str) -> Case:
    """The load whose goodput is looked for, at any rate."""
    return Case("one picture", topology, _ONE)


def bounds(profile: Profile) -> Slo:
    """The SLO of a goodput."""
    picture = profile.encoder.tower.seconds([(1024.0, 1)])
    first_s = picture + profile.language.prefill_s([(256 + 60, 0)])
    step_s = profile.language.step_s(1, 300)
    return Slo(ttft_s=_SLO_TTFT * first_s, tpot_s=_SLO_TPOT * step_s, quantile=_SLO_QUANTILE)


def goodput_again(one: dict[str, Any]) -> dict[str, Any]:
    """A goodput that was measured, with what the simulation says of it now."""
    topology, requests = parse(one["topology"], policy=POLICY), one["requests"]
    found = goodput(
        Host(**one["host"]).on(load(PROFILE, Profile)),
        sought(topology.name).workload(), topology, Slo(**one["slo"]),
        least_requests=requests, most_requests=requests, start=4.0,
    )  # fmt: skip
    return {**one, "predicted": found.rate}


def simulated(kept: dict[str, Any]) -> dict[str, Any]:
    """All that was measured, with what the simulation says of it now."""
    goodputs = [goodput_again(one) for one in kept["goodput"]]
    return {**kept, "loads": [again(one) for one in kept["loads"]], "goodput": goodputs}
