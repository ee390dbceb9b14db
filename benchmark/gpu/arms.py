"""The ways to feed a tower that `tower.py` compares, and the tables of what came of them."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import Any

from gpu.feeding import Fed

SIZES = {"56": (56, 56), "224": (224, 224), "448": (448, 448), "1080p": (1920, 1080)}


def label(size: str) -> str:
    """A size for people."""
    return f"{size} px" if size.isdecimal() else size


@dataclass(frozen=True)
class Arm:
    """A way to feed a tower.

    Attributes:
        size: of the pictures.
        preparers: 0: the pictures are prepared beforehand.
        torch_threads: that torch uses for one picture; 0: as many as it likes.
        patches: in a batch at most.
        items: in a batch at most.
        depth: passes in flight.
        pinned: whether patches are in pinned memory.
        kept: whether freed memory stays in the process, for the next picture.
    """

    size: str
    preparers: int = 0
    torch_threads: int = 0
    patches: int = 16_384
    items: int = 256
    depth: int = 2
    pinned: bool = True
    kept: bool = True

    @property
    def name(self) -> str:
        threads = f" of {self.torch_threads} torch threads" if self.torch_threads else ""
        how = f"{self.preparers} preparers{threads}" if self.preparers else "ready"
        pinned, kept = "" if self.pinned else ", pageable", "" if self.kept else ", new pages"
        return f"{label(self.size)}, {how}{pinned}{kept}"


def arms_of(which: str) -> list[Arm]:
    """The arms of a choice: "all", "few", "graphs" or "tiny"."""
    if which == "tiny":
        some = [Arm("56", patches=1024, items=items) for items in (4, 16)]
        return [*some, Arm("56", 2, 1, patches=1024, depth=1, pinned=False)]
    cores = len(os.sched_getaffinity(0))
    team = max(1, cores // 8)
    now = [Arm(size, 8, team) for size in ("448", "1080p")]  # as encoders on GPUs do
    first = [*now, Arm("448"), Arm("1080p"), Arm("224", items=128)]
    if which == "graphs":
        return first
    if which == "few":
        jpegs = [Arm("224", 8, team), *(Arm(size, 4, 1) for size in ("448", "1080p"))]
        jpegs += [Arm("448", 8, 1)]
        return [*first, *jpegs, Arm("448", patches=8192), Arm("1080p", 8, team, kept=False)]
    ready = [Arm("448", patches=patches) for patches in (4096, 8192, 16_384, 32_768)]
    ready += [Arm("1080p", patches=patches) for patches in (8192, 16_384, 32_768)]
    ready += [Arm("224", items=items) for items in (32, 64, 128)]
    ready += [Arm(size, depth=1) for size in ("448", "1080p")]
    ready += [Arm(size, pinned=False) for size in ("448", "1080p")]
    ready += [Arm(size, kept=False) for size in ("448", "1080p")]
    jpegs = [Arm(size, preparers, 1) for size in ("448", "1080p") for preparers in (2, 4, 16)]
    jpegs += [Arm("448", 1, 1), Arm("448", 24, 1), Arm("224", 4, 1), Arm("224", 8, team)]
    jpegs += [Arm(size, 8, threads) for size in ("448", "1080p") for threads in (1, cores)]
    jpegs += [Arm(size, 8, team, pinned=False) for size in ("448", "1080p")]
    jpegs += [Arm(size, 8, team, kept=False) for size in ("448", "1080p")]
    # First what decides, should time be short.
    return [*now, *ready, *jpegs]


def fed_rows(runs: dict[Arm, list[Fed]], best: dict[str, float]) -> list[list[str]]:
    """A row for each arm: medians of its runs.

    Args:
        best: images/s by size of passes alone, at their best.
    """
    head = "pictures, patches, items, depth, images/s, low to high, of alone, busy, a pass"
    rows = [[*head.split(", "), "launch ms", "device ms", "host ms/image"]]
    for arm, fed in runs.items():

        def median(name: str, fed: list[Fed] = fed) -> float:
            return statistics.median(getattr(one, name) for one in fed)

        rates = [one.rate for one in fed]
        host = statistics.median(sum(one.host_ms.values()) for one in fed)
        row = [arm.name, str(arm.patches), str(arm.items), str(arm.depth)]
        row += [f"{median('rate'):.1f}", f"{min(rates):.1f} to {max(rates):.1f}"]
        row += [f"{median('rate') / best[arm.size]:.0%}" if arm.size in best else ""]
        row += [f"{median('busy'):.0%}", f"{median('batch'):.1f}", f"{median('launch_ms'):.1f}"]
        row += [f"{median('device_ms'):.1f}", f"{host:.1f}"]
        rows.append(row)
    return rows


def host_rows(runs: dict[Arm, list[Fed]]) -> list[list[str]]:
    """Processor milliseconds a picture, by kind of thread."""
    names = sorted({name for fed in runs.values() for one in fed for name in one.host_ms})
    rows = [["pictures", *names]]
    for arm, fed in runs.items():
        spent = [statistics.median(one.host_ms.get(name, 0.0) for one in fed) for name in names]
        rows.append([arm.name, *(f"{ms:.2f}" for ms in spent)])
    return rows


def pass_rows(passes: list[dict[str, Any]]) -> list[list[str]]:
    """Passes that run alone."""
    rows = [["pictures", "patches", "launch ms", "waits", "kernels ms", "alone ms", "images/s"]]
    for one in passes:
        figures = [f"{one['launch_ms']:.1f}", "yes" if one["waits"] else ""]
        figures += [f"{one[key]:.1f}" for key in ("kernels_ms", "alone_ms")]
        rate = one["pictures"] / one["kernels_ms"] * 1e3
        pictures = f"{one['pictures']} of {label(one['size'])}"
        rows.append([pictures, str(one["patches"]), *figures, f"{rate:.0f}"])
    return rows


def best_rates(passes: list[dict[str, Any]]) -> dict[str, float]:
    """Images/s by size, of the kernels alone."""
    rates: dict[str, float] = {}
    for one in passes:
        rate = one["pictures"] / one["kernels_ms"] * 1e3
        rates[one["size"]] = max(rate, rates.get(one["size"], 0.0))
    return rates


def headline(runs: dict[Arm, list[Fed]]) -> str:
    """The best of the tower alone, and with decoding."""
    best: dict[str, float] = {}
    for arm, fed in runs.items():
        key = f"{label(arm.size)}{' from JPEG' if arm.preparers else ''}"
        best[key] = max(best.get(key, 0.0), statistics.median(one.rate for one in fed))
    return "; ".join(f"{key} {rate:.0f}/s" for key, rate in best.items())
