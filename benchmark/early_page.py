"""The page of `early.py`; all times are the emulated machines'."""

from __future__ import annotations

from comparison.figures import percentile
from early_cells import (
    LOADS,
    MACHINES,
    OFF,
    ON,
    SIDE,
    Cell,
    Measured,
    Passes,
    Results,
    cells,
    passes,
)
from pages import table

HEAD = ["machine", "servers", "sent", "load", "arm", "answered", "TTFT p50 (ms)", "p99",
        "p50 by that of off", "p99 by it", "text's TPOT p50 (ms)", "p99", "p50 by that of off",
        "tokens prefilled early", "overrun"]  # fmt: skip
BOUNDS = ["machine", "servers", "sent", "encoding", "prefill", "one after the other", "bound",
          "off p50", "auto p50", "saved", "of what the bound allows"]  # fmt: skip


def rows(results: Results, one: Cell) -> list[list[str]]:
    """A cell's arms."""
    arms = {found.arm: found for found in results.of(one.name)}
    off = arms.get(OFF)
    return [[*_where(one), one.load, *_figures(found, off)] for found in arms.values()]


def bounds(results: Results, one: Cell) -> list[str]:
    """Beside what a cell's requests can save; empty where they did not come one at a time, or
    one of both was not measured."""
    arms = {found.arm: found for found in results.of(one.name)}
    on, off = arms.get(ON), arms.get(OFF)
    if one.load != "alone" or on is None or off is None:
        return []
    cost, saved_s = passes(one, off.prompt), saved(on, off)
    seconds = [cost.encode, cost.prefill, cost.serial, cost.bound]
    cells = [f"{1e3 * value:.0f}" for value in seconds]
    medians = [f"{percentile(arm.ttfts_ms, 0.5):.0f}" for arm in (off, on)]
    allowed = share(cost, saved_s)
    return [*_where(one), *cells, *medians, f"{1e3 * saved_s:.0f}",
            "" if allowed is None else f"{allowed:.0%}"]  # fmt: skip


def saved(on: Measured, off: Measured) -> float:
    """Seconds of the median time to first token."""
    return (percentile(off.ttfts_ms, 0.5) - percentile(on.ttfts_ms, 0.5)) / 1e3


def share(cost: Passes, saved_s: float) -> float | None:
    """Of what the bound allows; None where it allows nothing."""
    allowed = cost.serial - cost.bound
    return saved_s / allowed if allowed > 1e-6 else None


def _where(one: Cell) -> list[str]:
    sent = "a video" if one.sent == "video" else f"{one.sent} pictures"
    return [MACHINES[one.machine].title, one.topology, sent]


def _figures(found: Measured, off: Measured | None) -> list[str]:
    answered = len(found.ttfts_ms) + len(found.tpots_ms)
    cells = [found.arm, f"{answered} of {answered + len(found.failures)}"]
    for values, others in (
        (found.ttfts_ms, off.ttfts_ms if off else []),
        (found.tpots_ms, off.tpots_ms if off else []),
    ):
        places = 0 if values is found.ttfts_ms else 1
        quantiles = (0.5, 0.99)
        cells += [f"{percentile(values, at):.{places}f}" if values else "" for at in quantiles]
        compared = quantiles if values is found.ttfts_ms else quantiles[:1]
        cells += [
            f"{percentile(values, at) / percentile(others, at):.2f}" if values and others else ""
            for at in compared
        ]
    sent = found.prompt * len(found.ttfts_ms)
    cells.append(f"{found.early_tokens / sent:.0%}" if found.early_tokens and sent else "")
    return [*cells, f"{found.overrun_s / found.accelerator_s:.1%}"]


def page(results: Results) -> str:
    measured = [one for one in cells() if results.of(one.name)]
    where = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value)
    packages = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    dilations = sorted({one.dilation for one in results.measured})
    commands = "\n".join(f"    .venv/bin/python {command}" for command in results.commands)
    loads = "\n".join(f"- `{name}`: {what}" for name, what in LOADS.items())
    every = [row for one in measured for row in rows(results, one)]
    allowed = [row for one in measured if (row := bounds(results, one))]
    stands = "\n".join(
        f"- {one.title}: profile `{one.profile}`, each token and patch for {one.shrink:.3f}"
        for name, one in MACHINES.items()
        if any(cell.machine == name for cell in measured)
    )
    return f"""# Prefill beside encoding, on emulated machines

{commands}

{where}. {packages}. Passes are stretched {" or ".join(f"{one:g}" for one in dilations)} times, and
times divided by it: all of them are the emulated machines'. No GPU was used:
[emulated machines](../../docs/emulated.md) says what is real.

## What it shows

{results.read.strip() or "Nothing is said of this run yet."}

## Times

Arms are up together and have their turns, request by request (under `half`, some requests each).
Pictures of {SIDE} px stand for pictures of 1080p, and cost what those do:

{stands}

Loads:

{loads}

{table([HEAD, *every])}

*p99* is nearly the slowest of so few. *Tokens prefilled early* are shares of all prompts' tokens.
*Overrun* is by how much real passes took longer than their emulated time, of all emulated time.
{_allowed(allowed)}"""


def _allowed(found: list[list[str]]) -> str:
    if not found:
        return ""
    return f"""
## What overlap could save

Milliseconds of the passes alone, by the profile: *encoding* of all items, *prefill* of the prompt
after it. The *bound* is the later of two ends: the last item is encoded, and it and what follows
it are prefilled; or the first item is encoded, and the whole prompt is prefilled in one go. What
`auto` saved of the median time to the first token is compared with what the bound saves.

{table([BOUNDS, *found])}
"""
