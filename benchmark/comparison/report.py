"""The page of a comparison: tables, ratios and their spread, of the raw results alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pages import table

from comparison import aims
from comparison.arms import Arm
from comparison.figures import SHOWN, Run, Spread, mean, percentile, ratios, spread
from comparison.results import CLOSE, Question, Results
from comparison.workloads import Workload

Figure = Callable[[Run], float]
# Kinds of failures that are shown of an arm.
_KINDS_SHOWN = 3


def line(run: Run) -> str:
    """A run in a line, for who watches."""
    p50, p99 = SHOWN["p50"], SHOWN["p99"]
    return (
        f"{run.arm}, {run.workload} at {run.rate:g}/s: {len(run.outcomes)} requests, "
        f"{len(run.failed)} failed, TTFT p50 {_ms(p50(run.ttfts_ms()))} "
        f"p99 {_ms(p99(run.ttfts_ms()))} ms, TPOT p50 {p50(run.tpots_ms()):.1f} ms, "
        f"{run.throughput:.2f} requests/s"
    )


def page(results: Results, plots: Sequence[Path] = ()) -> str:
    parts = [_head(results), _aims(results), results.read]
    parts += [_workload(results, one) for one in results.workloads]
    parts += [_goodput(results), _answers(results), _failures(results), _commands(results)]
    if plots:
        shown = "\n".join(f"![{path.stem}]({path.as_posix()})" for path in plots)
        parts.append(f"## Plots\n\n{shown}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(results: Results) -> str:
    baseline = results.baseline.title
    where = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value)
    packages = ", ".join(f"{name} {value}" for name, value in results.versions.items())
    cores = _cores(results.cores)
    client = (
        "which the client shares"
        if results.client_cores == results.cores
        else f"the client on {_cores(results.client_cores)}"
    )
    partial = "" if results.finished else "**Partial: it has not come to its end.**\n\n"
    note = f" {results.note}" if results.note else ""
    several = "s" if results.rounds > 1 else ""
    took = f"{results.rounds} round{several} in {results.minutes:.0f} minutes"
    gpus = f", GPUs {', '.join(map(str, results.gpus))}" if results.gpus else ""
    return f"""# Arms side by side

{partial}`{results.command}`

{where}; {packages}; checkpoint {results.model}{f", `{results.flags}`" if results.flags else ""};
scale {results.scale}, seed {results.seed}, {took}.{note}

{_order(results)}, each on {cores}{gpus}, {client}.
All got the same requests, byte for byte
({"yes" if same_requests(results) else "NO"}, by digest). Times are in milliseconds, of all
of an arm's rounds together; failed requests have none, and are counted. p99 is the least value
that 99% do not exceed: of fewer than a hundred requests the largest. Ratios are medians over
rounds of the ratio in each, with the lowest and the highest, of arms that have rounds in
common: it is they that tell, as a machine is faster in some minutes than in others. Below 1 is
better for times, above 1 for throughput. The baseline: {baseline}.{_rounds(results)}"""


def _order(results: Results) -> str:
    if any(planned.together for planned in results.planned):
        return (
            "The arms of a round were up together and took turns, load by load, the first one "
            "another each time; those that were not in work were idle"
        )
    return "One arm was up at a time, in each round in another order"


def _rounds(results: Results) -> str:
    """Who was in which, where there were several."""
    if results.finished and len(results.planned) < 2:
        return ""
    lines = []
    for number, planned in enumerate(results.planned):
        arms = [name for name in planned.arms if (name, number) in results.done]
        loads = "all workloads"
        if len(planned.workloads) < len(results.workloads):
            loads = ", ".join(f"`{name}`" for name in planned.workloads)
        if arms:
            lines.append(f"- round {number + 1}: {', '.join(arms)}; {loads}")
    return "\n\nArms and workloads of each round:\n\n" + "\n".join(lines or ["- none"])


def same_requests(results: Results) -> bool:
    """Whether all arms were sent the same, wherever two had the same run."""
    sent: dict[tuple[object, ...], set[str]] = {}
    for run in results.runs:
        key = (run.workload, run.round, run.rate, run.probe)
        sent.setdefault(key, set()).add(run.requests)
    return all(len(digests) == 1 for digests in sent.values())


def _workload(results: Results, workload: Workload) -> str:
    scale = workload.scale(results.scale)
    runs = [run for run in results.runs if run.workload == workload.name and not run.probe]
    kinds = sorted({one.kind for run in runs for one in run.outcomes})
    kinds = [""] if len(kinds) == 1 else kinds
    rows = [["at", *(["of"] if kinds != [""] else []), "arm", "answered"]]
    rows[0] += [f"TTFT {name}" for name in SHOWN] + [f"TPOT {name}" for name in SHOWN]
    rows[0] += ["requests/s", "tokens/s"]
    against = [["at", *(["of"] if kinds != [""] else []), "arm", "to"]]
    against[0] += ["TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "throughput"]
    for rate in scale.rates:
        for kind in kinds:
            for arm in results.arms:
                mine = [run for run in runs if (run.arm, run.rate) == (arm.name, rate)]
                if not mine:
                    continue
                begin = [_rate(rate), *([kind] if kind else []), arm.title]
                rows.append([*begin, *_times(mine, kind)])
                for other in rivals(results, arm):
                    theirs = [run for run in runs if (run.arm, run.rate) == (other.name, rate)]
                    compared = _ratios(mine, theirs, kind)
                    if any(compared):
                        against.append([*begin, other.title, *map(shown, compared)])
    sizes = ", ".join(f"{one.width}x{one.height}" for one in scale.sizes)
    media = f"pictures of {sizes}" if sizes else ""
    if scale.clip is not None:
        clip = scale.clip
        media = f"clips of {clip.frames} frames of {clip.width}x{clip.height}"
    each = "a turn" if workload.turns > 1 else "each"
    long = [f"runs of {scale.seconds:g} s"] if any(scale.rates) else []
    long += [f"{scale.requests} requests one at a time"] if 0 in scale.rates else []
    text = f"""## {workload.title}

`{workload.name}`: {scale.text_tokens} tokens of text and {scale.answer_tokens} of answer {each},
{media}; {", ".join(long)}.

{table(rows)}"""
    return text + (f"\n\n{table(against)}" if len(against) > 1 else "")


def rivals(results: Results, arm: Arm) -> list[Arm]:
    """What an arm is compared with: the baseline, and in-tree EPD if it is one of ours."""
    first = results.baseline
    others = [one for one in results.arms if one.family == "in-tree" and one.name != first.name]
    found = [first, *(others if arm.family == "sglang-epd" else [])]
    return [one for one in found if one.name != arm.name]


def _times(runs: list[Run], kind: str) -> list[str]:
    outcomes = [one for run in runs for one in run.of(kind)]
    failed = sum(bool(one.failure) for one in outcomes)
    ttfts = [value for run in runs for value in run.ttfts_ms(kind)]
    tpots = [value for run in runs for value in run.tpots_ms(kind)]
    cells = [f"{len(outcomes) - failed} of {len(outcomes)}"]
    cells += [_ms(figure(ttfts)) for figure in SHOWN.values()]
    cells += [_short(figure(tpots)) for figure in SHOWN.values()]
    if kind:  # of all kinds together
        return [*cells, "", ""]
    cells.append(_short(mean([run.throughput for run in runs])))
    return [*cells, _short(mean([run.token_rate for run in runs]))]


def _ratios(mine: list[Run], theirs: list[Run], kind: str) -> list[Spread | None]:
    figures: list[Figure] = [
        lambda run: percentile(run.ttfts_ms(kind), 0.5),
        lambda run: percentile(run.ttfts_ms(kind), 0.99),
        lambda run: percentile(run.tpots_ms(kind), 0.5),
        lambda run: percentile(run.tpots_ms(kind), 0.99),
        lambda run: run.throughput,
    ]
    return [ratios(by_round(mine, one), by_round(theirs, one)) for one in figures]


def by_round(runs: list[Run], figure: Figure) -> dict[int, float]:
    return {run.round: figure(run) for run in runs}


def _goodput(results: Results) -> str:
    if not results.searches:
        return ""
    rows = [["workload", "arm", "goodput (requests/s)", "to the baseline's", "limits", "tried"]]
    stated = []
    for workload in results.workloads:
        found = [one for one in results.searches if one.workload == workload.name]
        scale = workload.scale(results.scale).goodput
        if not found or scale is None:
            continue
        stated.append(
            f"- `{workload.name}`: p99 TTFT at most {scale.ttft:g} times the p50 of the baseline "
            f"in the same round, one request at a time, p99 TPOT at most {scale.tpot:g} times, "
            "and no request failed"
        )
        base = {s.round: s.found.rate for s in found if s.arm == results.baseline.name}
        for arm in results.arms:
            mine = [one for one in found if one.arm == arm.name]
            if not mine:
                continue
            rates = spread([one.found.rate for one in mine])
            ratio = ratios({one.round: one.found.rate for one in mine}, base)
            capped = " or more" if any(one.found.capped for one in mine) else ""
            limits = "; ".join(
                f"{one.limits.ttft_ms:.0f}, {one.limits.tpot_ms:.1f} ms" for one in mine
            )
            tried = "; ".join(
                ", ".join(f"{rate:g} {'yes' if held else 'no'}" for rate, held in one.found.tried)
                for one in mine
            )
            rows.append(
                [workload.name, arm.title, shown(rates) + capped, shown(ratio), limits, tried]
            )
    return "\n\n".join(
        [
            "## Goodput\n\nThe highest rate, of those that were tried by bisection, at which:",
            "\n".join(stated),
            "0 is said where the lowest rate did not hold.",
            table(rows),
        ]
    )


def _answers(results: Results) -> str:
    """Every arm's answers next to the first ones of the baseline."""
    if not results.questions:
        return ""
    reference: dict[tuple[str, int], Question] = {}
    for one in results.questions:
        if one.arm == results.baseline.name:
            reference.setdefault((one.workload, one.number), one)
    rows = [["arm", "asked", "equal", "largest difference", "differ", "failed"]]
    for arm in results.arms:
        mine = [one for one in results.questions if one.arm == arm.name]
        gaps = [
            one.gap(reference[one.workload, one.number])
            if (one.workload, one.number) in reference
            else float("inf")
            for one in mine
        ]
        equal = [gap for gap in gaps if gap <= CLOSE]
        failed = sum(bool(one.failure) for one in mine)
        rows.append(
            [
                *(arm.title, str(len(mine)), str(len(equal))),
                f"{max(equal):.1e}" if equal else "",
                *(str(len(mine) - len(equal) - failed), str(failed)),
            ]
        )
    return f"""## Answers

Before its first loads each arm was asked questions of every workload, alone. Equal is an
answer with the tokens of the baseline's, and log-probabilities that differ by at most {CLOSE:g}.

{table(rows)}"""


def _failures(results: Results) -> str:
    lines = []
    for arm in results.arms:
        why: Counter[str] = Counter()
        runs = [run for run in results.runs if run.arm == arm.name]
        for run in runs:
            why.update(one.failure for one in run.failed)
        total = sum(len(run.outcomes) for run in runs)
        shown_ones = "; ".join(f"{n} {text!r}" for text, n in why.most_common(_KINDS_SHOWN))
        lines.append(
            f"- {arm.title}: {why.total()} of {total} failed"
            + (f": {shown_ones}" if shown_ones else "")
        )
    lines += [f"- {note}" for note in results.notes]
    return "## Failures\n\nSearches for goodput included.\n\n" + "\n".join(lines)


def _aims(results: Results) -> str:
    rows = [["aim", "measured", "met"]]
    rows += [[one.aim, one.measured, "yes" if one.met else "no"] for one in aims.judge(results)]
    return f"## Aims\n\n{table(rows)}" if len(rows) > 1 else ""


def _commands(results: Results) -> str:
    parts = []
    for arm in results.arms:
        starts = [one for one in results.starts if one.arm == arm.name]
        if starts:
            seconds = ", ".join(f"{one.seconds:.0f}" for one in starts)
            loads = [f"{one.load:g}" for one in starts if one.load is not None]
            busy = f"; load average before: {', '.join(loads)}" if loads else ""
            told = "\n".join(f"    {command}" for command in starts[0].commands)
            parts.append(f"{arm.title} (ready after {seconds} s{busy}):\n\n{told}")
    clients = [run.command for run in results.runs if "bench_serving" in run.command]
    if clients:
        parts.append(f"A client's, of the first run:\n\n    python -m {clients[0]}")
    return "## Commands\n\n" + "\n\n".join(parts)


def shown(figure: Spread | None) -> str:
    """A median with lowest and highest, if there are several rounds."""
    if figure is None:
        return "none"
    if figure.rounds == 1:
        return _short(figure.median)
    return f"{_short(figure.median)} ({_short(figure.lowest)} to {_short(figure.highest)})"


def _rate(rate: float) -> str:
    return f"{rate:g}/s" if rate else "one at a time"


def _ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}"


def _short(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _cores(cores: list[int]) -> str:
    named = ", ".join(map(str, cores))
    return f"core {named}" if len(cores) == 1 else f"cores {named}"
