"""Markdown that the benchmarks' pages share."""

from __future__ import annotations

import os
import platform


def machine() -> str:
    """The machine that this runs on, in a phrase."""
    return f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"


def table(rows: list[list[str]]) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
