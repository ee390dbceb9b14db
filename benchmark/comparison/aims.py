"""What this package sets out to reach, and whether a comparison shows it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from comparison.figures import Run, Spread, percentile, ratios
from comparison.results import Results

# Their arms, by file.
_ONE, _DP, _IN_TREE, _OURS = "colocated", "colocated-dp", "in-tree-1e1p", "epd-1e1p"
# Pairs whose towers have equal cores for a request that is alone, and how many.
_EQUAL_TOWERS = ((_OURS, _ONE, "all"), ("epd-cores", "colocated-core", "one"))
_SLACK_MS, _SLACK = 10.0, 1.05


class Aim(msgspec.Struct, frozen=True):
    """One aim, what was measured of it, and whether that meets it."""

    aim: str
    measured: str
    met: bool


def judge(results: Results) -> Iterator[Aim]:
    """Those aims whose arms and workloads were run."""
    yield from _never_behind(results)
    yield from _interference(results)
    yield from _repeats(results)
    yield from _cold(results)
    yield from _goodput(results)


def _told(ratio: Spread) -> str:
    """With its spread, if it has one."""
    if ratio.rounds == 1:
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} ({ratio.lowest:.2f} to {ratio.highest:.2f})"


def _medians(
    results: Results, arm: str, workload: str, *, share: float, kind: str = "", tpot: bool = False
) -> dict[tuple[float, int], float]:
    """A percentile by rate and round, of runs that answered anything."""
    found = {}
    for run in _runs(results, arm, workload):
        values = run.tpots_ms(kind) if tpot else run.ttfts_ms(kind)
        if values:
            found[run.rate, run.round] = percentile(values, share)
    return found


def _runs(results: Results, arm: str, workload: str) -> list[Run]:
    return [r for r in results.runs if (r.arm, r.workload, r.probe) == (arm, workload, False)]


def _at(figures: dict[tuple[float, int], float], rate: float) -> dict[int, float]:
    return {number: value for (at, number), value in figures.items() if at == rate}


def _never_behind(results: Results) -> Iterator[Aim]:
    behind, judged = [], 0
    for workload in results.workloads:
        mine = _medians(results, _OURS, workload.name, share=0.5)
        theirs = _medians(results, _IN_TREE, workload.name, share=0.5)
        for rate in sorted({rate for rate, _ in mine.keys() & theirs.keys()}):
            ratio = ratios(_at(mine, rate), _at(theirs, rate))
            if ratio is not None:
                judged += 1
                if ratio.median > 1:
                    behind.append(f"{workload.name} at {rate:g}/s ({_told(ratio)})")
    if judged:
        yield Aim(
            "never behind in-tree EPD (p50 TTFT, 1E1P)",
            f"behind in {len(behind)} of {judged} cases" + "".join(f"; {one}" for one in behind),
            not behind,
        )


def _ratio_aim(
    results: Results,
    aim: str,
    names: tuple[str, str, str],
    *,
    most: float,
    share: float,
    kind: str = "",
    tpot: bool = False,
) -> Iterator[Aim]:
    """Mine by theirs is at most `most`, at the highest rate that both have."""
    workload, own, other = names
    mine = _medians(results, own, workload, share=share, kind=kind, tpot=tpot)
    theirs = _medians(results, other, workload, share=share, kind=kind, tpot=tpot)
    rates = {rate for rate, _ in mine.keys() & theirs.keys()}
    ratio = ratios(_at(mine, max(rates)), _at(theirs, max(rates))) if rates else None
    if ratio is not None:
        yield Aim(aim, f"{_told(ratio)} times", ratio.median <= most)


def _interference(results: Results) -> Iterator[Aim]:
    yield from _ratio_aim(
        results,
        "interference: p99 TPOT of text-only requests at most half of one server's",
        ("interference", _OURS, _ONE),
        most=0.5,
        share=0.99,
        kind="text",
        tpot=True,
    )


def _repeats(results: Results) -> Iterator[Aim]:
    for workload, kind, what in (("repeats", "", "repeats"), ("turns", "later", "later turns")):
        yield from _ratio_aim(
            results,
            f"{what}: p50 TTFT at most a tenth of in-tree EPD's",
            (workload, _OURS, _IN_TREE),
            most=0.1,
            share=0.5,
            kind=kind,
        )


def _cold(results: Results) -> Iterator[Aim]:
    for own, other, cores in _EQUAL_TOWERS:
        mine = _at(_medians(results, own, "single", share=0.5), 0)
        theirs = _at(_medians(results, other, "single", share=0.5), 0)
        both = sorted(mine.keys() & theirs.keys())
        if not both:
            continue
        ours = sum(mine[number] for number in both) / len(both)
        one = sum(theirs[number] for number in both) / len(both)
        each = "; by round " + ", ".join(f"{mine[n]:.0f} and {theirs[n]:.0f}" for n in both)
        yield Aim(
            f"a single cold image: TTFT within {_SLACK_MS:.0f} ms plus 5% of one server's, "
            f"{cores} of the cores for either tower",
            f"{ours:.0f} ms, one server {one:.0f} ms{each if len(both) > 1 else ''}",
            ours <= one * _SLACK + _SLACK_MS,
        )


def _goodput(results: Results) -> Iterator[Aim]:
    """In the rounds that dp 2 was in."""
    found = [one for one in results.searches if one.workload == "four_images"]
    rounds = {one.round for one in found if one.arm == _DP}
    best: dict[str, float] = {}
    for search in found:
        if search.round in rounds:
            best[search.arm] = max(best.get(search.arm, 0.0), search.found.rate)
    ours = {arm.name for arm in results.arms if arm.family == "sglang-epd"} & best.keys()
    if ours:
        first = max(sorted(ours), key=lambda name: best[name])
        each = ", ".join(f"{name} {best[name]:g}/s" for name in (*sorted(ours), _DP))
        yield Aim(
            "goodput with 4 images ahead of one server at dp 2",
            each,
            best[first] > best[_DP],
        )
