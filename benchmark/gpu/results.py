"""What a part of the kit hands back: tables for people, figures for programs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@dataclass
class Results:
    """One part's results.

    Attributes:
        part: its name.
        headline: the figure or two that a reader wants first.
        tables: rows by title; the first row of each is its head.
        figures: everything measured, as plain data.
    """

    part: str
    headline: str = ""
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path | None) -> None:
        """Write the file that `run.py` reads; called after each step, so that a part that is
        ended at its time limit leaves what it has measured."""
        if path is None:
            return
        told = {
            "part": self.part,
            "machine": machine(),
            "headline": self.headline,
            "tables": self.tables,
            "figures": self.figures,
        }
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(told, indent=1) + "\n")
        unfinished.replace(path)

    def print(self) -> None:
        for title, rows in self.tables.items():
            print(f"\n{title}\n{aligned(rows)}")
        print(f"\n{self.part}: {self.headline}", flush=True)


def aligned(rows: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def machine() -> dict[str, Any]:
    """The machine and the software that this runs on."""
    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "sglang")},
        "command": _command(),
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        facts["gpu"] = device.name
        facts["gpu_memory_gib"] = round(device.total_memory / 2**30, 1)
        facts["gpu_multiprocessors"] = device.multi_processor_count
        facts["cuda"] = torch.version.cuda
        query = ["driver_version", "pcie.link.gen.current", "pcie.link.width.current"]
        facts["nvidia_smi"] = _nvidia_smi(query)
    return facts


def _command() -> str:
    """As typed in a clone, without the file that results go to."""
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", f"benchmark/gpu/{Path(sys.argv[0]).name}", *words])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _nvidia_smi(query: list[str]) -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error}"
    return f"{', '.join(query)}: {done.stdout.strip()}"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every part has."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="the file that the results go to")
    parser.add_argument("--minutes", type=float, default=4.0, help="no step begins after these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
