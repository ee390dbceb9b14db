"""The table of docs/design/transfer.md that says how often an embedding is copied."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/design/transfer.md"
_ROW = re.compile(r"^\| ([^|]+?) \| (\d) \| (\d) \|", re.MULTILINE)


def documented() -> dict[str, tuple[int, int]]:
    """Copies by this package or SGLang, and by the kernel, by row of the table."""
    return {
        name: (int(ours), int(kernels)) for name, ours, kernels in _ROW.findall(PAGE.read_text())
    }
