"""The answers of `sglang-epd plan`: plain data for `--json`, lines of text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_epd.profile import Profile
from sglang_epd_plan import plots
from sglang_epd_plan.model import simulate
from sglang_epd_plan.planning import SHAPES, NoPlanError, Plan, enough, plan
from sglang_epd_plan.report import Report, Slo
from sglang_epd_plan.topology import parse
from sglang_epd_plan.workload import Traffic, Workload

Answer = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """The options' values for all deployments."""

    profile: Profile
    workload: Workload
    slo: Slo
    rate: float
    policy: str
    cells: int
    requests: int
    seed: int


def simulated(
    question: Question, topologies: Sequence[str], *, plots_to: Path | None
) -> list[Answer]:
    """The results of each topology at the rate.

    Raises:
        ConfigError: a topology or the rate cannot be used.
    """
    policy, cells, rate = question.policy, question.cells, question.rate
    parsed = [parse(one, policy=policy, cells=cells) for one in topologies]
    requests = question.requests
    if 0 < rate < math.inf:
        requests = enough(question.workload, question.slo, rate / cells, requests)
    traffic = Traffic(rate=rate, requests=requests * cells)
    reports = {
        one.name: simulate(question.profile, question.workload, one, traffic, seed=question.seed)
        for one in parsed
    }
    _draw_steps(plots_to, reports)
    return [_answer(report, question.slo) for report in reports.values()]


def planned(
    question: Question, shapes: Sequence[str] | None, *, plots_to: Path | None
) -> list[Answer]:
    """The smallest deployment of each shape that meets the SLO, the cheapest first.

    Raises:
        ConfigError: a shape, the policy or the rate cannot be used.
    """
    plans: list[Plan] = []
    answers: list[Answer] = []
    for shape in shapes or SHAPES:
        try:
            one = plan(
                question.profile, question.workload, question.slo, question.rate, shape,
                policy=question.policy, cells=question.cells, requests=question.requests,
                seed=question.seed,
            )  # fmt: skip
        except NoPlanError as error:
            answers.append({"shape": shape, "none": str(error)})
            continue
        plans.append(one)
        answers.append(_plan_answer(one, question))
    _draw_steps(plots_to, {one.topology.name: one.report for one in plans})
    if plots_to and plans:
        # Runs at rates that miss the SLO stop early, so they are no points of a curve.
        sweeps = {
            one.topology.name: sorted(
                ((run.rate, run.report) for run in one.limit.trials if run.holds),
                key=lambda point: point[0],
            )
            for one in plans
        }
        plots.sweep(plots_to / "rates.svg", sweeps, question.slo)
    return sorted(answers, key=lambda answer: answer.get("cost_hour", float("inf")))


def text(answer: Answer) -> str:
    """One answer, for people."""
    if "none" in answer:
        return f"{answer['shape']}: no plan. {answer['none']}"
    bound = f"p{100 * answer['slo_quantile']:g}"
    lines = [
        f"{answer['topology']}: {answer['gpus']:g} GPUs, "
        + ("meets the SLO" if answer["meets_slo"] else "misses the SLO"),
        f"  TTFT {_latency(answer['ttft_ms'], bound)}; "
        f"TPOT {_latency(answer['tpot_ms'], bound)}; "
        f"{answer['requests_per_s']:.4g} requests/s answered",
        "  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in answer["busy"].items()),
    ]
    if answer["prefix_cache"]:
        lines.append(f"  found in prefix caches: {answer['prefix_cache']:.0%} of prompt tokens")
    if again := answer["items"].get("sent again", 0):
        lines.append(f"  sent again, to another encoder or later: {again} items")
    failed = {name: count for name, count in answer["outcomes"].items() if name != "done"}
    if failed:
        lines.append("  failed: " + ", ".join(f"{n} {name}" for name, n in failed.items()))
    if "cost_hour" in answer:
        lines += [
            f"  costs {answer['cost_hour']:g} an hour, {answer['cost_million_requests']:g} a "
            "million requests",
            f"  holds up to {answer['most_requests_per_s']:.4g} requests/s; what gives way first: "
            f"{answer['breaks_first']}",
        ]
    return "\n".join(lines)


def _plan_answer(one: Plan, question: Question) -> Answer:
    hour = one.topology.hour_cost(question.profile)
    of_one = _answer(one.report, question.slo)
    return {
        "shape": one.shape,
        **of_one,
        # The run was one of the cells, and all else is of all of them.
        **{
            name: round(of_one[name] * question.cells, 4)
            for name in ("requests_per_s", "output_tokens_per_s")
        },
        "topology": one.topology.name,
        "gpus": one.topology.gpus(question.profile),
        "cost_hour": round(hour, 3),
        "cost_million_requests": round(hour / 3600 / question.rate * 1e6, 3),
        "most_requests_per_s": round(one.limit.rate * question.cells, 4),
        "breaks_first": one.breaks,
        "tried": [{"topology": name, "holds": held} for name, held in one.steps],
    }


def _answer(report: Report, slo: Slo) -> Answer:
    summary = report.summary(slo.quantile)
    return {**summary, "slo_quantile": slo.quantile, "meets_slo": report.meets(slo)}


def _draw_steps(folder: Path | None, reports: Mapping[str, Report]) -> None:
    if folder and reports:
        folder.mkdir(parents=True, exist_ok=True)
        plots.steps(folder / "steps.svg", reports)


def _latency(quantiles: Mapping[str, float | None], bound: str) -> str:
    shown = (
        f"{name} {'never' if ms is None else f'{ms:.4g} ms'}"
        for name, ms in quantiles.items()
        if name in ("p50", bound)
    )
    return ", ".join(shown)
