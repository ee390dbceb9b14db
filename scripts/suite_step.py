"""One pytest run that leaves behind how each test came out.

    suite_step.py OUTCOMES.json [pytest's arguments]

The file is written with pytest's closing summary. A run that crashes leaves no file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

# Of each part of a log; all of it stands where pytest printed it.
LINES = 60


class Recorder:
    """The pytest plug-in that writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats
        failures = [*stats.get("failed", ()), *stats.get("error", ())]
        outcomes = {
            "failures": {one.nodeid: log_of(one) for one in failures},
            "passed": sorted({one.nodeid for one in stats.get("passed", ())}),
            "skipped": sorted({one.nodeid for one in stats.get("skipped", ())}),
        }
        self._path.write_text(json.dumps(outcomes))


def log_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The ends of the traceback and of the captured output."""
    parts = [("Traceback", report.longreprtext), *report.sections]
    return "\n".join(f"--- {title} ---\n{end_of(text)}" for title, text in parts)


def end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Recorder(Path(sys.argv[1]))]))
