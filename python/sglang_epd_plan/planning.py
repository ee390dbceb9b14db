"""How many servers of which kind a workload needs, and what gives way first.

The mean work of a request gives a lower bound of each count. Then the kind of server that the
slowest requests wait for grows until the SLO holds, and servers that are not needed are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sglang_epd.errors import ConfigError
from sglang_epd.profile import Profile
from sglang_epd.schema import convert
from sglang_epd_plan.goodput import Goodput, Trial, goodput, trial
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.topology import Topology
from sglang_epd_plan.workload import Closed, Kind, Workload, mean

# Kinds of deployment, and the counts of a topology that each has.
SHAPES: dict[str, tuple[str, ...]] = {
    "EPD": ("prefills",),
    "E+PD": ("encoders", "prefills"),
    "EP+D": ("prefills", "decodes"),
    "E+P+D": ("encoders", "prefills", "decodes"),
}
# The kind of server to blame for a step of the time to first token: where it does not exist, and
# for the other steps, those that prefill.
_BLAME = {
    "prepare": "encoders",
    "encoder queue": "encoders",
    "encode": "encoders",
    "hand over": "decodes",
}
# How long a rate is held, at least: in seconds; in bounds on the time to first token, so that
# an overload of 2%, the tolerance of `goodput`, misses it; and in mean answers or conversations, so
# that as many are under way as there will ever be.
_HELD_S, _HELD_BOUNDS, _HELD_ANSWERS = 120.0, 50, 5
# How busy servers are by the first guess; by which share a count grows; and how often.
_BUSY = 0.85
_GROWTH = 0.1
_ROUNDS = 60


class NoPlanError(Exception):
    """No number of servers of this shape meets the SLO."""


@dataclass
class Plan:
    """The result of `plan` for one shape.

    Attributes:
        topology: the smallest that meets the SLO.
        report: its run at the rate of one cell.
        limit: its goodput, of one cell.
        breaks: what gives way first, in words.
        steps: the topologies that were tried, and whether they met the SLO.
    """

    shape: str
    topology: Topology
    report: Report
    limit: Goodput
    breaks: str
    steps: list[tuple[str, bool]]


def work(profile: Profile, workload: Workload, slo: Slo) -> dict[str, float]:
    """Seconds that a mean request takes of one server of each kind, decoded in the largest batch
    whose steps keep the SLO."""
    total = sum(kind.weight for kind in workload.kinds)
    encode = prefill = decode = 0.0
    for kind in workload.kinds:
        share = kind.weight / total
        items, media = mean(kind.items), _media(kind, profile)
        patches = math.fsum(patches for patches, _ in media) / len(media)
        tokens = mean(kind.text_tokens) + items * patches / profile.pixels.merge
        tower = profile.encoder.tower
        encode += share * items * math.fsum(tower.seconds([one]) for one in media) / len(media)
        language = profile.language
        prefill += share * language.prefill_s([(tokens, 0)])
        output = mean(kind.output_tokens)
        batch = _batch(profile, slo, tokens + output / 2)
        decode += share * output * language.step_s(batch, batch * tokens) / batch
    return {"encoders": encode, "prefills": prefill, "decodes": decode}


def plan(
    profile: Profile,
    workload: Workload,
    slo: Slo,
    rate: float,
    shape: str,
    *,
    policy: str = "affinity",
    cells: int = 1,
    requests: int = 2000,
    seed: int = 0,
) -> Plan:
    """The smallest deployment of a shape that meets an SLO at a rate.

    Args:
        rate: requests a second, of all cells together.
        cells: independent deployments that share the rate; counts are those of one.
        requests: of each run, which simulates one cell, at least (`enough`).

    Raises:
        ConfigError: there is no such shape, or a number is out of range.
        NoPlanError: a request alone is not in time, or growth does not help.
    """
    if shape not in SHAPES:
        raise ConfigError(f"{shape!r} is no shape: give one of {', '.join(SHAPES)}")
    if isinstance(workload.arrival, Closed) or not 0 < rate < math.inf:
        raise ConfigError("a plan is for a positive rate of open arrivals")
    if cells < 1 or requests < 100:
        raise ConfigError("a plan needs at least one cell and 100 requests")
    names = SHAPES[shape]
    each = rate / cells
    requests = enough(workload, slo, each, requests)
    steps: list[tuple[str, bool]] = []

    def build(counts: dict[str, int]) -> Topology:
        return convert({**counts, "policy": policy}, Topology, shape)

    def tried(counts: dict[str, int]) -> Trial:
        topology = build(counts)
        one = trial(profile, workload, topology, slo, each, requests=requests, seed=seed)
        steps.append((topology.name, one.holds))
        return one

    least = _least(profile, workload, slo, each, names)
    ample = build({name: 8 * count + 8 for name, count in least.items()})
    # At so low a rate that requests do not meet.
    alone = trial(profile, workload, ample, slo, 1e-3, requests=100, seed=seed)
    if not alone.holds:
        raise NoPlanError(
            "requests are not in time even if each has the servers to itself "
            f"(p{100 * slo.quantile:g} TTFT {alone.report.quantile('ttft', slo.quantile):.3f} s, "
            f"TPOT {1000 * alone.report.quantile('tpot', slo.quantile):.1f} ms)"
        )
    counts = dict(least)
    found = tried(counts)
    for _ in range(_ROUNDS):
        if found.holds:
            break
        name = blame(found.report, slo, names)
        counts[name] += max(1, round(counts[name] * _GROWTH))
        found = tried(counts)
    else:
        raise NoPlanError(f"{build(counts).name} does not meet the SLO either")
    found = _trim(counts, found, tried, profile)
    topology = build(counts)
    limit = goodput(
        profile, workload, topology, slo,
        seconds=requests / each, least_requests=requests, most_requests=2 * requests,
        seed=seed, start=each,
    )  # fmt: skip
    return Plan(
        shape,
        msgspec.structs.replace(topology, cells=cells),
        found.report,
        limit,
        breaking(limit, slo),
        steps,
    )


def enough(workload: Workload, slo: Slo, rate: float, least: int) -> int:
    """Requests of a run that is long enough to show whether an SLO holds: a queue that grows
    shows only in time."""
    total = sum(kind.weight for kind in workload.kinds)
    talk = 0.0
    for kind in workload.kinds:
        answer = slo.ttft_s + mean(kind.output_tokens) * slo.tpot_s
        turns = max(1.0, mean(kind.turns))
        talk += kind.weight / total * (turns * answer + (turns - 1) * kind.think_s)
    seconds = max(_HELD_S, _HELD_BOUNDS * slo.ttft_s, _HELD_ANSWERS * talk)
    return max(least, math.ceil(rate * seconds))


def _trim(
    counts: dict[str, int],
    found: Trial,
    tried: Callable[[dict[str, int]], Trial],
    profile: Profile,
) -> Trial:
    """Remove servers that are not needed from `counts`, the dearest kind first."""
    gpus = {"encoders": profile.encoder.gpus}
    for name in sorted(counts, key=lambda name: -gpus.get(name, profile.language.gpus)):
        stride = max(1, round(counts[name] * _GROWTH))
        while stride:
            if counts[name] > stride:
                fewer = tried({**counts, name: counts[name] - stride})
                if fewer.holds:
                    counts[name] -= stride
                    found = fewer
                    continue
            stride //= 2
    return found


def blame(report: Report, slo: Slo, names: Sequence[str]) -> str:
    """The kind of server of which there are too few."""
    ttft = report.quantile("ttft", slo.quantile) / slo.ttft_s
    tpot = report.quantile("tpot", slo.quantile) / slo.tpot_s
    if tpot > max(1.0, ttft):
        name = "decodes"
    else:
        slowest = report.step_means(1 - slo.quantile)
        name = _BLAME.get(max(slowest, key=lambda step: slowest[step]), "prefills")
    return name if name in names else "prefills"


def breaking(limit: Goodput, slo: Slo) -> str:
    """The bound that was missed at the lowest rate at which the SLO did not hold."""
    failed, held = limit.last(holds=False), limit.last(holds=True)
    if failed is None or held is None:
        return "nothing at the rates that were tried"
    report = failed.report
    parts = []
    for name, bound in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
        value = report.quantile(name, slo.quantile)
        if value > bound:
            parts.append(f"p{100 * slo.quantile:g} {name.upper()}")
    share = 1 - slo.quantile
    slowest, before = report.step_means(share), held.report.step_means(share)
    step = max(slowest, key=lambda step: slowest[step] - before[step])
    if parts and parts[0].endswith("TPOT"):
        where = "decode steps and what runs between them"
    else:
        where = step
    # A decode server is busy whenever it has one sequence, which says nothing.
    others = [name for name in report.busy if name != "decode"]
    busiest = max(others, key=lambda name: report.busy[name])
    return (
        f"{' and '.join(parts) or 'requests fail'} at {failed.rate:.3g} requests/s: {where} "
        f"({busiest} {100 * report.busy[busiest]:.0f}% busy)"
    )


def _least(
    profile: Profile, workload: Workload, slo: Slo, rate: float, names: tuple[str, ...]
) -> dict[str, int]:
    seconds = work(profile, workload, slo)
    # Servers that prefill do the work of the kinds that are missing.
    seconds["prefills"] += sum(seconds[name] for name in seconds if name not in names)
    return {name: max(1, math.ceil(rate * seconds[name] / _BUSY)) for name in names}


def _media(kind: Kind, profile: Profile) -> list[tuple[float, int]]:
    """Patches and steps of items, each as likely."""
    if kind.patches is not None:
        return [(mean(kind.patches), 1)]
    return [(one.patches(profile.pixels), one.frames) for one in kind.pictures] or [(0.0, 1)]


def _batch(profile: Profile, slo: Slo, context: float) -> int:
    """Sequences that can decode together within the SLO; at least one."""
    language = profile.language
    each = language.decode_sequence_s + context * language.decode_context_s
    room = int(language.kv_tokens // max(1.0, context))
    within = language.running
    if each > 0:
        within = int((slo.tpot_s - language.decode_launch_s) / each)
    return max(1, min(language.running, room, within))
