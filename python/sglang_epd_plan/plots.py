"""Plots of runs. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_epd_plan.report import STEPS, Report, Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Rates and reports, by rate.
Sweep = Sequence[tuple[float, Report]]


def sweep(path: Path, sweeps: Mapping[str, Sweep], slo: Slo) -> None:
    """TTFT, TPOT and throughput over the rate, one line per topology: p50 dashed, p99 solid.

    Args:
        path: ending in .svg or .png.
    """
    figure, axes = _figure(3)
    for number, (label, points) in enumerate(sweeps.items()):
        colour = f"C{number}"
        rates = [rate for rate, _ in points]
        for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
            for share, style in ((0.5, "--"), (0.99, "-")):
                values = [report.quantile(name, share) for _, report in points]
                axis.plot(rates, values, style, color=colour, label=label if style == "-" else None)
        axes[2].plot(rates, [report.throughput for _, report in points], color=colour, label=label)
    for axis, name in zip(axes, ("TTFT (s)", "TPOT (s)", "answered requests/s"), strict=True):
        _label(axis, "requests/s", name)
    for axis, bound in zip(axes, (slo.ttft_s, slo.tpot_s), strict=False):
        axis.axhline(bound, color="0.6", linewidth=0.8)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def steps(path: Path, reports: Mapping[str, Report]) -> None:
    """The mean parts of the time to first token, one bar per run."""
    figure, (axis,) = _figure(1)
    left = [0.0] * len(reports)
    for step in STEPS:
        widths = [report.step_means()[step] for report in reports.values()]
        axis.barh(list(reports), widths, left=left, label=step)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    _label(axis, "seconds, mean", "")
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=7)
    _save(figure, path)


def bars(path: Path, groups: Mapping[str, Mapping[str, float]], ylabel: str) -> None:
    """Groups of bars, with the same names in each."""
    figure, (axis,) = _figure(1, wide=True)
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [place + number * width for place in range(len(groups))]
        values = [group.get(name, 0.0) for group in groups.values()]
        drawn = axis.bar(places, values, width, label=name)
        axis.bar_label(drawn, fmt="%.3g", fontsize=7)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], list(groups))
    _label(axis, "", ylabel)
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def lines(path: Path, series: Mapping[str, Sequence[tuple[float, float]]], xy: str) -> None:
    """Plain lines.

    Args:
        xy: the labels of the axes, as "x, y".
    """
    figure, (axis,) = _figure(1)
    for label, points in series.items():
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    _label(axis, *xy.split(", ", 1))
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _figure(columns: int, wide: bool = False) -> tuple[Figure, Sequence[Axes]]:
    # pyplot would keep state and look for a display.
    from matplotlib.figure import Figure

    width = 4.0 * columns if columns > 1 else 7.5 if wide else 6.0
    figure = Figure(figsize=(width, 3.2), layout="constrained")
    axes: Any = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _label(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    import matplotlib

    # The same plot is the same file.
    with matplotlib.rc_context({"svg.hashsalt": "sglang-epd"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=120, metadata=metadata)
