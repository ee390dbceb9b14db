"""What `chaos.py` saw, and the page that is made of it."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from open_loop import ANSWER_TIMEOUT_S, Answer

from encoder import setting, table

# The aims, of a load with faults.
SLOWER = 3.0
RECOVERY_S = 5.0
# So many seconds in a row without a disturbance are a recovery.
CALM_ROW = 3
FAULTS = ("kill -9", "SIGSTOP", "SIGTERM")


@dataclass
class Event:
    """Something that was done to an encoder, or that it did.

    Attributes:
        at_s: from the beginning of the load.
        in_work: images that the encoder had in work then; None where it does not tell.
    """

    at_s: float
    what: str
    encoder: int
    in_work: int | None = None


@dataclass
class Run:
    """One load on one arm."""

    answers: list[Answer]
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Answer]:
        return [one for one in self.answers if one.failure]

    def ttft_ms(self, at: float) -> float:
        """A quantile over the requests that were answered."""
        ordered = sorted(one.ttft_s for one in self.answers if one.ttft_s is not None)
        return 1e3 * ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else math.nan


@dataclass
class Result:
    """What one arm came to."""

    capacity: float
    rate: float
    calm: Run
    chaos: Run
    notes: list[str]
    # Images that went through a tower, as far as encoders told before they died.
    forwards: int | None


def disturbed(run: Run, limit_s: float) -> list[int]:
    """Seconds whose requests, by arrival, failed or of which a tenth waited over `limit_s`."""
    seconds: dict[int, list[Answer]] = {}
    for one in run.answers:
        seconds.setdefault(int(one.arrival_s), []).append(one)
    found = []
    for second, answers in sorted(seconds.items()):
        waits = sorted(math.inf if one.ttft_s is None else one.ttft_s for one in answers)
        slow = waits[min(len(waits) - 1, int(0.9 * len(waits)))] > limit_s
        if slow or any(one.failure for one in answers):
            found.append(second)
    return found


def recovery_s(event_s: float, until_s: float, bad: Sequence[int]) -> float | None:
    """From an event to the first of CALM_ROW undisturbed seconds in a row.

    None: not before `until_s`, when something else happened. The second that an event
    falls into counts as disturbed after the event only if one of the next is, too.
    """
    second = int(event_s)
    while second < until_s:
        row = range(second, second + CALM_ROW)
        if not any(one in bad for one in row):
            return max(0.0, second - event_s)
        second = max(one for one in row if one in bad) + 1
    return None


def event_rows(result: Result) -> list[list[str]]:
    rows = [
        ["at (s)", "encoder", "event", "images in work there", "requests", "failed"],
    ]
    rows[0] += ["slowest TTFT (ms)", "disturbed seconds", "recovered after (s)"]
    run = result.chaos
    limit_s = SLOWER * result.calm.ttft_ms(0.5) / 1e3
    bad = disturbed(run, limit_s)
    for number, event in enumerate(run.events):
        until = run.events[number + 1].at_s if number + 1 < len(run.events) else run.seconds
        span = [one for one in run.answers if event.at_s <= one.arrival_s < until]
        waits = [one.ttft_s for one in span if one.ttft_s is not None]
        recovered = recovery_s(event.at_s, until, bad)
        rows.append(
            [
                f"{event.at_s:.1f}",
                str(event.encoder),
                event.what,
                "" if event.in_work is None else str(event.in_work),
                str(len(span)),
                str(sum(bool(one.failure) for one in span)),
                f"{1e3 * max(waits):.0f}" if waits else "none",
                str(sum(event.at_s <= second < until for second in bad)),
                "not before the next" if recovered is None else f"{recovered:.1f}",
            ]
        )
    return rows


def longest_recovery(result: Result) -> str:
    told = [row[-1] for row in event_rows(result)[1:]]
    worst = [one for one in told if not one[0].isdigit()]
    return worst[0] if worst else max(told, key=float, default="none")


def _ratio(result: Result, at: float) -> float:
    return result.chaos.ttft_ms(at) / result.calm.ttft_ms(at)


def _lost(result: Result) -> str:
    if result.forwards is None:
        return "not told"
    killed = sum(one.in_work or 0 for one in result.chaos.events if one.what == "kill -9")
    answered = len(result.calm.answers) + len(result.chaos.answers) - len(result.chaos.failed)
    again = max(0, result.forwards - (answered - len(result.calm.failed)))
    return f"{killed} in work on killed encoders; {again} encoded more than once"


def summary_rows(results: dict[str, Result]) -> list[list[str]]:
    rows = [["", *results]]

    def row(name: str, shown: Callable[[Result], str]) -> None:
        rows.append([name, *(shown(one) for one in results.values())])

    row("load, of a capacity of (requests/s)", lambda r: f"{r.rate:.1f} of {r.capacity:.1f}")
    row("requests, calm", lambda r: f"{len(r.calm.answers)}, {len(r.calm.failed)} failed")
    row("requests, with faults", lambda r: f"{len(r.chaos.answers)}, {len(r.chaos.failed)} failed")
    for at, name in ((0.5, "p50"), (0.99, "p99")):
        row(
            f"TTFT {name} (ms): calm, with faults, ratio",
            lambda r, at=at: f"{r.calm.ttft_ms(at):.0f}, {r.chaos.ttft_ms(at):.0f}, "
            f"{_ratio(r, at):.2f}",
        )
    row("slowest TTFT (ms): calm, with faults", lambda r: _pair(r, lambda one: one.ttft_ms(1.0)))
    row(
        "disturbed seconds: calm, with faults",
        lambda r: _pair(
            r, lambda one: len(disturbed(one, SLOWER * r.calm.ttft_ms(0.5) / 1e3)), " of {s:.0f}"
        ),
    )
    row("longest recovery (s)", longest_recovery)
    row("encoder work lost (images)", _lost)
    return rows


def _pair(result: Result, of: Callable[[Run], float], unit: str = "") -> str:
    return ", ".join(
        f"{of(run):.0f}{unit.format(s=run.seconds)}" for run in (result.calm, result.chaos)
    )


def failure_rows(results: dict[str, Result]) -> list[list[str]]:
    rows = [["arm", "load", "failure", "requests"]]
    for arm, result in results.items():
        for name, run in (("calm", result.calm), ("with faults", result.chaos)):
            for kind, count in Counter(one.failure for one in run.failed).most_common():
                rows.append([arm, name, kind.replace("|", "/"), str(count)])
    return rows


def verdicts(result: Result) -> str:
    recovery = longest_recovery(result)
    fine = recovery[0].isdigit() and float(recovery) <= RECOVERY_S
    failed = len(result.calm.failed) + len(result.chaos.failed)
    aims = (
        ("no request fails", failed == 0, f"{failed} failed"),
        (f"p99 within {SLOWER:.0f} times", _ratio(result, 0.99) <= SLOWER, "see above"),
        (f"recovery within {RECOVERY_S:.0f} s of each event", fine, recovery),
    )
    return "; ".join(f"{name}: {'met' if met else f'missed ({why})'}" for name, met, why in aims)


def page(options: argparse.Namespace, results: dict[str, Result]) -> str:
    way = "register themselves" if options.dynamic else "are listed on its command line"
    notes = "".join(f"\n- {note}" for one in results.values() for note in one.notes)
    events = "\n\n".join(
        f"### {arm}\n\n{table(event_rows(result))}" for arm, result in results.items()
    )
    failures = failure_rows(results)
    aims = f"Aims: {verdicts(results['sglang-epd'])}.\n\n" if "sglang-epd" in results else ""
    return f"""# Encoders that are killed, frozen and told to go

{setting(options)} {ENCODERS} encoders, which {way}, and one language server. One
{options.size} px picture and {options.tokens} tokens a request, streamed, at random (Poisson) moments,
{options.load:.0%} of what the arm answered to {CAPACITY_CLIENTS} clients just before. No picture comes twice, no
cache is on. The arms ran one after the other, in-tree EPD when our servers had ended.

Times count from the moment a request was to be sent at; quantiles are of those that were
answered. A request without an answer in 60 s has failed. A second is disturbed if a request that arrived in
it failed, or a tenth of them waited more than {SLOWER:.0f} times the calm p50 for their first token;
recovered is who has {CALM_ROW} undisturbed seconds in a row. All servers share the machine's cores, so
encoders start again at the lowest priority (nice {options.restart_nice}) until they are ready.

{table(summary_rows(results))}

{aims}{"Notes:" + notes + chr(10) if notes else ""}
## Events

Each row is about the requests that arrived from its event to the next.

{events}

## Failures

{table(failures) if len(failures) > 1 else "None."}
"""


def figures(options: argparse.Namespace, results: dict[str, Result]) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "cores": os.cpu_count(),
        "dynamic": options.dynamic,
        "arms": {
            arm: {
                "capacity_per_s": round(result.capacity, 2),
                "rate_per_s": round(result.rate, 2),
                "notes": result.notes,
                "forwards": result.forwards,
                "events": [asdict(event) for event in result.chaos.events],
                "calm": _series(result.calm),
                "chaos": _series(result.chaos),
            }
            for arm, result in results.items()
        },
    }


def _series(run: Run) -> dict[str, Any]:
    """Totals, and by second of arrival: requests, failed, median and longest TTFT."""
    seconds: dict[int, list[Answer]] = {}
    for one in run.answers:
        seconds.setdefault(int(one.arrival_s), []).append(one)
    lines = []
    for second, answers in sorted(seconds.items()):
        waits = [1e3 * one.ttft_s for one in answers if one.ttft_s is not None]
        shown = f"{statistics.median(waits):.0f} {max(waits):.0f}" if waits else "- -"
        failed = sum(bool(one.failure) for one in answers)
        lines.append(f"{second} {len(answers)} {failed} {shown}")
    return {
        "requests": len(run.answers),
        "failures": Counter(one.failure for one in run.failed),
        "ttft_ms": {name: round(run.ttft_ms(at), 1) for name, at in _QUANTILES.items()},
        "second requests failed ttft_p50_ms ttft_max_ms": lines,
    }


_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


