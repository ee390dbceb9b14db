"""Markdown that the benchmarks' pages share."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def machine() -> str:
    """The machine that this runs on, in a phrase."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"


def table(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def setting(options: argparse.Namespace) -> str:
    """How a page was made: its command, and where."""
    command = " ".join([".venv/bin/python", f"benchmark/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return (
        f"`{command}`: {machine()}, "
        f"sglang {version('sglang')}, torch {version('torch')}, checkpoint {options.model} in "
        f"float32, seed {options.seed}."
    )


def quantile_ms(seconds: Sequence[float], at: float) -> str:
    """The value that a share `at` of these lie below, in whole milliseconds."""
    ordered = sorted(seconds)
    return f"{ordered[min(len(ordered) - 1, int(at * len(ordered)))] * 1e3:.0f}"
