"""The whole suite in two steps: the fast tests on all cores, then those marked `servers`, two at
a time.

    suite.py [--marks EXPRESSION] [pytest's arguments]
    suite.py --fast [pytest's arguments]

A test that failed is run once more, alone, in a fresh pytest process. If it passes then, it is
reported as FLAKY with the log of its failure, and the suite passes. A pytest that does not
reach its summary fails the suite at once. The last lines name every failure and count the
tests of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

STEP = Path(__file__).with_name("suite_step.py")
# So many failures have one cause, which is not chance. A server that did not start is a failure
# of each of its tests.
MOST_AGAIN = 60
# One more process than cores: some tests wait. test/conftest.py says which runs what.
PROCESSES = str((os.cpu_count() or 1) + 1)
# Each has up to seven servers. One process alone leaves half of two cores idle.
SERVING = "2"
WIDTH = 80


@dataclass
class Outcomes:
    """How the tests of one pytest run came out.

    Attributes:
        status: the exit status of pytest; negative for a signal.
        ended: pytest has reached its summary, uninterrupted.
        failures: node ids with the tracebacks and captured output.
    """

    name: str
    status: int
    ended: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)


def run(name: str, arguments: list[str]) -> Outcomes:
    """Run pytest to its end."""
    print(f"\n{f' {name} ':=^{WIDTH}}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        process = subprocess.Popen([sys.executable, str(STEP), str(path), *arguments])

        def forward(number: int, _frame: FrameType | None) -> None:
            # A terminal sends Ctrl-C to pytest as well.
            if number != signal.SIGINT:
                process.send_signal(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        status = process.wait()
        if not path.exists():
            return Outcomes(name, status)
        told = json.loads(path.read_text())
    failures, passed, skipped = told["failures"], set(told["passed"]), set(told["skipped"])
    # pytest's own: 0 is fine, 1 is failed tests, others are interruptions and errors.
    ended = status == (1 if failures else 0)
    return Outcomes(name, status, ended, failures, passed - failures.keys(), skipped)


def flaky_in(steps: list[Outcomes], extra: list[str]) -> dict[str, str]:
    """The failures that do not happen again, with their logs."""
    failures = {name: log for step in steps for name, log in step.failures.items()}
    if not failures or not all(step.ended for step in steps):
        return {}
    if len(failures) > MOST_AGAIN:
        print(f"more than {MOST_AGAIN} tests failed: they are not run again")
        return {}
    again = run("failures, once more", [*extra, *failures])
    if not again.ended:
        return {}
    return {name: log for name, log in failures.items() if name in again.passed}


def report(steps: list[Outcomes], flaky: dict[str, str], seconds: float) -> int:
    """Print the last lines; the exit status."""
    failed = [name for step in steps for name in step.failures if name not in flaky]
    broken = [step for step in steps if not step.ended]
    for name, log in flaky.items():
        print(f"\n{f' failed once: {name} ':_^{WIDTH}}\n{log}")
    print(f"\n{' all steps ':=^{WIDTH}}")
    lines = [f"FLAKY {name}" for name in flaky] + [f"FAILED {name}" for name in failed]
    lines += [f"ERROR {step.name}: pytest ended with {step.status}" for step in broken]
    print("\n".join(lines))
    counts = {
        "failed": len(failed),
        "passed": sum(len(step.passed) for step in steps),
        "skipped": sum(len(step.skipped) for step in steps),
        "flaky": len(flaky),
        "error": len(broken),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"{f' {told} in {seconds:.2f}s ':=^{WIDTH}}", flush=True)
    return 1 if failed or broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--marks", default="", help="only tests of these")
    parser.add_argument("--fast", action="store_true", help="only the first step, fewer examples")
    options, extra = parser.parse_known_args()
    begin = time.monotonic()
    of_these = f" and ({options.marks})" if options.marks else ""
    extra = ["--no-loadscope-reorder", *extra]
    fast = ["-m", f"not servers{of_these}", "-n", PROCESSES, *extra]
    if options.fast:
        fast += ["--hypothesis-profile", "fast"]
    steps = [run("fast tests", fast)]
    if steps[0].ended and not options.fast:
        steps.append(run("tests with servers", ["-m", f"servers{of_these}", "-n", SERVING, *extra]))
    return report(steps, flaky_in(steps, extra), time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
