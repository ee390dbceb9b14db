"""The page of `validate_emulated.py`: how far off the planner is, load by load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages import table

# The compared figures, and the largest relative error of each.
BOUNDS = {
    "requests_per_s": 0.07,
    "ttft_p50_s": 0.15,
    "ttft_p99_s": 0.15,
    "tpot_p50_s": 0.15,
    "tpot_p99_s": 0.15,
}
# Errors of smaller figures are relative to this one: a time per token is next to nothing where a
# router has held tokens back and passes them on together.
_LEAST = 1e-3
GOODPUT_BOUND = 0.1
# The overrun up to which a run counts as one without contention; others are not kept.
FAITHFUL = 0.01


def off(one: dict[str, Any], name: str) -> float:
    """By how much a prediction is too high."""
    measured = one["measured"][name]
    return (one["predicted"][name] - measured) / max(measured, _LEAST)


def inside(one: dict[str, Any]) -> bool:
    return all(abs(off(one, name)) <= bound for name, bound in BOUNDS.items())


def overrun(one: dict[str, Any]) -> float:
    busy = one["accelerator_s"]
    return busy["overrun"] / (busy["tower"] + busy["prefill"] + busy["decode"])


def rows(loads: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Each load with its measured figures and the error of each prediction."""
    made = []
    for one in loads:
        cells = [one["topology"], one["case"], one["load"]]
        for name in BOUNDS:
            measured = one["measured"][name]
            shown = f"{1000 * measured:.0f}" if name.startswith("t") else f"{measured:.2f}"
            cells.append(f"{shown}, {off(one, name):+z.0%}")
        cells += [f"{overrun(one):.1%}", f"{one['load_average']:.1f}"]
        made.append([*cells, "yes" if inside(one) else "no"])
    return made


def page(kept: dict[str, Any]) -> str:
    loads = kept["loads"]
    head = ["servers", "pictures of a request", "load", "requests/s", "TTFT p50 (ms)"]
    head += [
        "TTFT p99",
        "TPOT p50 (ms)",
        "TPOT p99",
        "overrun",
        "load average",
        "within all bounds",
    ]
    counts = ", ".join(
        f"{sum(abs(off(one, name)) <= bound for one in loads)} of {len(loads)}"
        for name, bound in BOUNDS.items()
    )
    busy = [["servers", "pictures of a request", "load", "tower", "prefill", "decode"]]
    for one in loads:
        ratios = [
            f"{one['predicted_s'][kind] / one['accelerator_s'][kind] - 1:+z.1%}"
            if one["accelerator_s"][kind]
            else ""
            for kind in ("tower", "prefill", "decode")
        ]
        busy.append([one["topology"], one["case"], one["load"], *ratios])
    hosts = [["servers", "a request", "448 px", "a step"]]
    for one in {one["topology"]: one for one in loads}.values():
        host = one["host"]
        hosts.append(
            [one["topology"]]
            + [f"{1000 * host[name]:.1f}" for name in ("request_s", "large_s", "step_s")]
        )
    dilations = sorted({one["dilation"] for one in loads})
    return f"""# The planner beside real servers on emulated accelerators

`.venv/bin/python benchmark/validate_emulated.py`: {kept["machine"]}, {kept["versions"]}, checkpoint
{kept["checkpoint"]}, profile `benchmark/simulated/{kept["profile"]}`, passes stretched
{" or ".join(f"{dilation:g}" for dilation in dilations)} times. All times are the emulated
machines'. No GPU was used: [emulated machines](../../docs/emulated.md) says what is real.

Servers and simulation have the same requests at the same moments, and the same times of passes.
Encoders take turns (`round_robin`): with `affinity` a picture's content would choose its encoder,
which is chance. Of two servers each simulated request goes to the one that the real client chose
(but for 2EPD, whose choices were not kept): a few milliseconds decide that. No figure is fitted to
these loads. {loads[0]["requests"]} requests a load, so p99 is nearly the slowest. Each cell has
the figure of the servers, and how far off the simulation is, in shares of it, or of 1 ms where the
figure is smaller: tokens that a router held back arrive together.

{table([head, *rows(loads)])}

Within 7% in throughput, and 15% in p50 TTFT, p99 TTFT, p50 TPOT and p99 TPOT: {counts}; in all of
them: {sum(map(inside, loads))} of {len(loads)}. The load average counts everything on the machine.
Where other processes want its cores, real passes overrun and the host's work takes longer than
that of the idle requests: runs with an overrun above {FAITHFUL:.0%} are not kept.
{goodput_page(kept["goodput"])}
## Work of the accelerators

How far off the simulated time of all passes of a load is, by kind. It says whether batches are
as large as the servers'.

{table(busy)}

## The host

What single requests to idle servers take beside their passes, divided by the stretching (ms),
and the simulation has as constants: a text, a picture more, and a step.

{table(hosts)}
"""


def goodput_page(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return ""
    lines = [["servers", "TTFT, TPOT (ms)", "tried", "goodput (requests/s)", "predicted", "error"]]
    for one in found:
        tried = ", ".join(f"{rate:.1f} {'yes' if held else 'no'}" for rate, held in one["tried"])
        error = f"{one['predicted'] / one['measured'] - 1:+z.0%}" if one["measured"] else "too high"
        bounds = f"{1000 * one['slo']['ttft_s']:.0f}, {1000 * one['slo']['tpot_s']:.1f}"
        figures = [f"{one['measured']:.1f}", f"{one['predicted']:.1f}"]
        lines.append([one["topology"], bounds, tried, *figures, error])
    return f"""
## Goodput

Single pictures, Poisson arrivals: the highest rate at which {found[0]["slo"]["quantile"]:.0%} of
{found[0]["requests"]} requests keep each bound, by bisection to 8%. A prediction within
{GOODPUT_BOUND:.0%} is aimed at.

{table(lines)}
"""
