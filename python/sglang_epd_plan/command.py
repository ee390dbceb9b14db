"""The options of `sglang-epd plan`. `answers` makes the answers; it is imported when the command
runs, because the `plan` extra may not be installed and numpy takes a moment."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sglang_epd.errors import ConfigError


def plan(
    *,
    profile: Annotated[
        str, typer.Option(help="What work costs: a file, or the name of a profile that ships here.")
    ],
    workload: Annotated[
        Path, typer.Option(help="Which requests arrive: a JSON, YAML or TOML file.", dir_okay=False)
    ],
    rate: Annotated[
        float, typer.Option(help="Requests a second, each turn counted; 0 for closed loops.")
    ],
    ttft_s: Annotated[float, typer.Option(help="SLO on the time to first token.")] = 2.0,
    tpot_s: Annotated[float, typer.Option(help="SLO on a request's mean time per token.")] = 0.1,
    quantile: Annotated[float, typer.Option(help="Share of requests that meet each bound.")] = 0.99,
    shape: Annotated[
        list[str] | None, typer.Option(help="EPD, E+PD, EP+D or E+P+D; all if none is given.")
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(help="Simulate this and plan nothing: 4EPD, 1E3PD, 2E1P1D, 1EP1D."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Dispatch policy.")] = "affinity",
    cells: Annotated[int, typer.Option(help="Independent deployments that share the rate.")] = 1,
    requests: Annotated[
        int, typer.Option(help="Requests of each run, in each cell, at least.")
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for plots (SVG).", file_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """How many encoders, prefills and decodes a workload needs, and what gives way first."""
    needed = ("simpy", "matplotlib") if plots else ("simpy",)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the planner needs {' and '.join(missing)}: "
            'pip install ".[plan]" in a clone of sglang-epd'
        )
    from sglang_epd.profile import load_profile
    from sglang_epd.schema import convert, load
    from sglang_epd_plan import answers
    from sglang_epd_plan.report import Slo
    from sglang_epd_plan.workload import Workload

    if topology and shape:
        raise ConfigError("--topology simulates what is given, --shape plans: give one")
    slo = convert({"ttft_s": ttft_s, "tpot_s": tpot_s, "quantile": quantile}, Slo, "SLO")
    question = answers.Question(
        load_profile(profile), load(workload, Workload), slo, rate, policy, cells, requests, seed
    )
    if topology:
        found = answers.simulated(question, topology, plots_to=plots)
    else:
        found = answers.planned(question, shape, plots_to=plots)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo("\n".join(map(answers.text, found)))
