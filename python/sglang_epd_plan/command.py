"""`sglang-epd plan`: how many encoders, prefills and decodes, at what cost, and what gives way
first; or, with `--topology`, what a given deployment does.

Needs the `plan` extra (`pip install ".[plan]"` in a clone).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_epd.errors import ConfigError

if TYPE_CHECKING:
    from sglang_epd_plan.goodput import Goodput
    from sglang_epd_plan.model import Failure
    from sglang_epd_plan.planning import Plan
    from sglang_epd_plan.profile import Profile
    from sglang_epd_plan.report import Report, Slo
    from sglang_epd_plan.topology import Topology
    from sglang_epd_plan.workload import Workload


def plan(
    *,
    profile: Annotated[
        str, typer.Option(help="What work costs: a file, or the name of one that comes along.")
    ],
    workload: Annotated[
        Path, typer.Option(help="Who asks for what: a JSON, YAML or TOML file.", dir_okay=False)
    ],
    rate: Annotated[float, typer.Option(help="Requests a second; 0 for closed loops.")],
    ttft_s: Annotated[float, typer.Option(help="SLO on the time to the first token.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(help="SLO on a request's mean time a token.")] = 0.1,
    quantile: Annotated[float, typer.Option(help="Share of requests that meet it.")] = 0.99,
    shape: Annotated[
        list[str] | None, typer.Option(help="EPD, E+PD, EP+D, E+P+D; all of them if not given.")
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(help="Simulate this and plan nothing: 4EPD, 1E3PD, 2E1P1D, 1EP1D."),
    ] = None,
    failure: Annotated[
        list[str] | None,
        typer.Option(
            help="With --topology, in each cell: 0@60+30 ends encoder 0 after 60 seconds, for 30."
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Of dispatch.")] = "affinity",
    cells: Annotated[int, typer.Option(help="Independent deployments that share it all.")] = 1,
    requests: Annotated[int, typer.Option(help="That each run simulates.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes, for cells of a topology.")] = 1,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for plots (SVG).", file_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """How many encoders, prefills and decodes a workload needs, and what gives way first."""
    try:
        import simpy  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'the planner needs: pip install ".[plan]" in a clone of sglang-epd'
        ) from error
    from sglang_epd_plan.model import parse_failure
    from sglang_epd_plan.profile import load_profile
    from sglang_epd_plan.report import Slo
    from sglang_epd_plan.schema import convert, load
    from sglang_epd_plan.topology import parse
    from sglang_epd_plan.workload import Workload

    machine, asked = load_profile(profile), load(workload, Workload)
    slo = convert({"ttft_s": ttft_s, "tpot_s": tpot_s, "quantile": quantile}, Slo, "SLO")
    if topology and shape:
        raise ConfigError("--topology simulates what is given, --shape plans: give one")
    if failure and not topology:
        raise ConfigError("--failure is for --topology: a plan has no encoder to end yet")
    if topology:
        chosen = [parse(text, policy=policy, cells=cells) for text in topology]
        results = _simulate(
            machine, asked, slo, chosen, rate=rate, requests=requests, seed=seed, jobs=jobs,
            failures=tuple(parse_failure(text) for text in failure or ()), plots=plots,
        )  # fmt: skip
    else:
        results = _plan(
            machine, asked, slo, shape, rate=rate, policy=policy, cells=cells,
            requests=requests, seed=seed, plots=plots,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(results, indent=1))
        return
    for one in results:
        typer.echo(_text(one))


def _simulate(
    machine: Profile,
    asked: Workload,
    slo: Slo,
    topologies: list[Topology],
    *,
    rate: float,
    requests: int,
    seed: int,
    jobs: int,
    failures: tuple[Failure, ...],
    plots: Path | None,
) -> list[dict[str, Any]]:
    from sglang_epd_plan.model import Traffic
    from sglang_epd_plan.run import simulate

    reports = {
        topology.name: simulate(
            machine,
            asked,
            topology,
            Traffic(rate=rate, requests=requests * topology.cells),
            seed=seed,
            failures=failures,
            jobs=jobs,
        )
        for topology in topologies
    }
    _draw(plots, reports)
    return [_answer(report, slo) for report in reports.values()]


def _plan(
    machine: Profile,
    asked: Workload,
    slo: Slo,
    shapes: list[str] | None,
    *,
    rate: float,
    policy: str,
    cells: int,
    requests: int,
    seed: int,
    plots: Path | None,
) -> list[dict[str, Any]]:
    from sglang_epd_plan.planning import SHAPES, NoPlanError, plan

    found: list[Plan] = []
    answers: list[dict[str, Any]] = []
    for shape in shapes or SHAPES:
        try:
            one = plan(
                machine, asked, slo, rate, shape,
                policy=policy, cells=cells, requests=requests, seed=seed,
            )  # fmt: skip
        except NoPlanError as error:
            answers.append({"shape": shape, "none": str(error)})
            continue
        found.append(one)
        cost = one.cost(machine, rate)
        answers.append(
            {
                "shape": shape,
                **_answer(one.report, slo),
                "topology": one.topology.name,
                "gpus": one.topology.gpus(machine),
                "cost_hour": round(cost["hour"], 3),
                "cost_million_requests": round(cost["million_requests"], 3),
                "most_requests_per_s": round(one.limit.rate * cells, 4),
                "breaks_first": one.breaks,
                "tried": [{"topology": name, "holds": held} for name, held in one.steps],
            }
        )
    _draw(plots, {one.topology.name: one.report for one in found})
    _draw_rates(plots, {one.topology.name: one.limit for one in found}, slo)
    return sorted(answers, key=lambda answer: answer.get("cost_hour", float("inf")))


def _answer(report: Report, slo: Slo) -> dict[str, Any]:
    return {**report.summary(), "meets_slo": report.meets(slo)}


def _draw(folder: Path | None, reports: dict[str, Report]) -> None:
    if folder is None or not reports:
        return
    from sglang_epd_plan import plots

    folder.mkdir(parents=True, exist_ok=True)
    plots.steps(folder / "steps.svg", reports)


def _draw_rates(folder: Path | None, limits: dict[str, Goodput], slo: Slo) -> None:
    """At the rates at which the SLO held: the others end as soon as it does not."""
    if folder is None or not limits:
        return
    from sglang_epd_plan import plots

    sweeps = {
        name: sorted(
            ((one.rate, one.report) for one in limit.tries if one.holds), key=lambda point: point[0]
        )
        for name, limit in limits.items()
    }
    plots.sweep(folder / "rates.svg", sweeps, slo)


def _text(one: dict[str, Any]) -> str:
    """One answer, for people."""
    if "none" in one:
        return f"{one['shape']}: no plan. {one['none'].removeprefix(one['shape'] + ': ')}"
    again = one["items"].get("sent again", 0)
    lines = [
        f"{one['topology']}: {one['gpus']:g} GPUs, "
        + ("meets the SLO" if one["meets_slo"] else "misses the SLO"),
        f"  TTFT p50 {_ms(one, 'ttft_ms', 'p50')}, p99 {_ms(one, 'ttft_ms', 'p99')}; "
        f"TPOT p50 {_ms(one, 'tpot_ms', 'p50')}, p99 {_ms(one, 'tpot_ms', 'p99')}; "
        f"{one['requests_per_s']:.4g} requests/s answered",
        "  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in one["busy"].items()),
    ]
    failed = {name: count for name, count in one["outcomes"].items() if name != "done"}
    if one["prefix_cache"]:
        lines.append(f"  found in prefix caches: {one['prefix_cache']:.0%} of prompt tokens")
    if again:
        lines.append(f"  sent again, to another encoder or later: {again} items")
    if failed:
        lines.append("  failed: " + ", ".join(f"{n} {name}" for name, n in failed.items()))
    if "cost_hour" in one:
        lines += [
            f"  costs {one['cost_hour']:g} an hour, {one['cost_million_requests']:g} a million "
            "requests",
            f"  holds up to {one['most_requests_per_s']:.4g} requests/s; what gives way first: "
            f"{one['breaks_first']}",
        ]
    return "\n".join(lines)


def _ms(one: dict[str, Any], name: str, quantile: str) -> str:
    value = one[name][quantile]
    return "never" if value is None else f"{value:.4g} ms"


if __name__ == "__main__":
    typer.run(plan)
