"""Plots of a comparison: times and throughput against rate, goodput as bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from comparison.arms import Arm
from comparison.figures import SHOWN, Run, spread
from comparison.results import Results

_LABELS = {"ttft": "TTFT (ms)", "tpot": "TPOT (ms)", "throughput": "requests answered a second"}
_DPI = 110


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the plots into a folder; returns their paths.

    A workload of one rate has none: its tables say as much.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for workload in results.workloads:
        runs = [r for r in results.runs if (r.workload, r.probe) == (workload.name, False)]
        runs = [run for run in runs if run.rate]
        if len({run.rate for run in runs}) > 1:
            path = folder / f"{workload.name}.png"
            _rates(workload.title, runs, results.arms, path)
            drawn.append(path)
    if results.searches:
        drawn.append(folder / "goodput.png")
        _goodput(results, drawn[-1])
    return drawn


def _rates(title: str, runs: Sequence[Run], arms: Sequence[Arm], path: Path) -> None:
    figure, axes = pyplot.subplots(3, 3, figsize=(13, 10), squeeze=False)
    for column, (name, of) in enumerate(SHOWN.items()):
        for row, what in enumerate(("ttft", "tpot")):
            axis = axes[row][column]
            axis.set_title(f"{what.upper()} {name}")
            axis.set_ylabel(_LABELS[what])
            _lines(axis, runs, arms, _of(what, of))
    _lines(axes[2][0], runs, arms, lambda run: run.throughput)
    axes[2][0].set_title("throughput")
    axes[2][0].set_ylabel(_LABELS["throughput"])
    for empty in axes[2][1:]:
        empty.axis("off")
    handles, names = axes[2][0].get_legend_handles_labels()
    axes[2][1].legend(handles, names, loc="center", frameon=False)
    figure.suptitle(title)
    _save(figure, path)


def _of(what: str, figure: Callable[[Sequence[float]], float]) -> Callable[[Run], float]:
    return lambda run: figure(run.ttfts_ms() if what == "ttft" else run.tpots_ms())


def _lines(
    axis: pyplot.Axes, runs: Sequence[Run], arms: Sequence[Arm], figure: Callable[[Run], float]
) -> None:
    """One an arm: medians over rounds, with lowest and highest."""
    for arm in arms:
        points = []
        for rate in sorted({run.rate for run in runs}):
            of_rate = [figure(r) for r in runs if (r.arm, r.rate) == (arm.name, rate)]
            if (one := spread(of_rate)) is not None:
                points.append((rate, one))
        if points:
            axis.errorbar(
                [rate for rate, _ in points],
                [one.median for _, one in points],
                yerr=[
                    [one.median - one.lowest for _, one in points],
                    [one.highest - one.median for _, one in points],
                ],
                marker="o",
                capsize=3,
                label=arm.title,
            )
    axis.set_xlabel("requests a second")
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)


def _goodput(results: Results, path: Path) -> None:
    names = [w.name for w in results.workloads]
    names = [name for name in names if any(s.workload == name for s in results.searches)]
    figure, axis = pyplot.subplots(figsize=(2 + 3 * len(names), 4.5))
    width = 0.8 / len(results.arms)
    for number, arm in enumerate(results.arms):
        bars = []
        for place, name in enumerate(names):
            mine = [
                s.found.rate for s in results.searches if (s.arm, s.workload) == (arm.name, name)
            ]
            if (one := spread(mine)) is not None:
                bars.append((place + number * width, one))
        axis.bar(
            [place for place, _ in bars], [one.median for _, one in bars], width, label=arm.title
        )
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names)
    axis.set_ylabel("goodput (requests a second)")
    axis.legend(fontsize="small")
    _save(figure, path)


def _save(figure: pyplot.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
