"""What `chaos.py` saw, and the page that is made of it."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from open_loop import ANSWER_TIMEOUT_S, Answer
from pages import setting, table

# The aims, of a load with faults.
SLOWER = 3.0
RECOVERY_S = 5.0
FAULTS = ("kill -9", "SIGSTOP", "SIGTERM")
ENCODERS = 3
CAPACITY_CLIENTS = 16
_NEVER = "not before the next fault"
_ORDER = """ The arms ran one after the other:
in-tree EPD started when our servers had ended."""
_NICE = "encoders start again at a lower priority (nice {}) until they are ready."
_FORKS = """encoders start again as forks of a process that has imported SGLang (importing is most
of what a start costs), at a lower priority (nice {}) until they are ready."""


@dataclass
class Event:
    """Something that was done to a server, or that it did.

    Attributes:
        at_s: from the beginning of the load.
        in_work: images that the encoder had in work then; None where it does not tell.
    """

    at_s: float
    what: str
    server: str
    in_work: int | None = None


@dataclass
class Run:
    """One load on one arm."""

    answers: list[Answer]
    events: list[Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max((one.arrival_s for one in self.answers), default=0.0)

    @property
    def failed(self) -> list[Answer]:
        return [one for one in self.answers if one.failure]

    def ttft_ms(self, at: float) -> float:
        """A quantile over the requests that were answered."""
        ordered = sorted(one.ttft_s for one in self.answers if one.ttft_s is not None)
        return 1e3 * ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else math.nan


@dataclass
class Result:
    """What one arm came to.

    Attributes:
        capacity: requests a second that it answered at most.
        rate: requests a second that it was sent.
        forwards: images that went through a tower, as far as encoders told before they
            died; None where they do not tell.
    """

    capacity: float
    rate: float
    calm: Run
    chaos: Run
    notes: list[str]
    forwards: int | None

    @property
    def limit_s(self) -> float:
        """Who waits longer for a first token is disturbed."""
        return SLOWER * self.calm.ttft_ms(0.5) / 1e3


def _by_second(answers: Sequence[Answer], begin_s: float) -> dict[int, list[Answer]]:
    """By arrival, in seconds from `begin_s`."""
    seconds: dict[int, list[Answer]] = {}
    for one in answers:
        seconds.setdefault(int(one.arrival_s - begin_s), []).append(one)
    return dict(sorted(seconds.items()))


def disturbed(answers: Sequence[Answer], begin_s: float, limit_s: float) -> dict[int, bool]:
    """The seconds from `begin_s` in which requests arrived that failed, or of which a tenth
    waited over `limit_s` for the first token; and whether any failed."""
    found = {}
    for second, those in _by_second(answers, begin_s).items():
        failed = any(one.failure for one in those)
        waits = sorted(math.inf if one.ttft_s is None else one.ttft_s for one in those)
        if failed or waits[min(len(waits) - 1, int(0.9 * len(waits)))] > limit_s:
            found[second] = failed
    return found


def recovery_s(bad: Mapping[int, bool]) -> int:
    """When the last disturbance since an event had ended, in seconds.

    One second by itself, in which nothing failed, is none: there are such in peace.
    """
    lasting = [
        second
        for second, failed in bad.items()
        if failed or second == 0 or second - 1 in bad or second + 1 in bad
    ]
    return max(lasting) + 1 if lasting else 0


def recoveries(result: Result) -> list[int | None]:
    """Of each event, in s; None: not before the next fault.

    What comes after another event is that one's, unless the disturbance has lasted till then.
    """
    events, answers = result.chaos.events, result.chaos.answers
    found: list[int | None] = []
    for number, event in enumerate(events):
        for later in [*events[number + 1 :], None]:
            until_s = later.at_s if later else result.chaos.seconds
            span = [one for one in answers if event.at_s <= one.arrival_s < until_s]
            recovered = recovery_s(disturbed(span, event.at_s, result.limit_s))
            lasted = recovered > max(_by_second(span, event.at_s), default=0)
            if not lasted or later is None or later.what in FAULTS:
                found.append(None if lasted else recovered)
                break
    return found


def event_rows(result: Result) -> list[list[str]]:
    head = ["at (s)", "server", "event", "images in work there", "requests", "failed"]
    rows = [[*head, "slowest TTFT (ms)", "disturbed seconds", "recovered after (s)"]]
    events, answers = result.chaos.events, result.chaos.answers
    ends = [event.at_s for event in events[1:]] + [result.chaos.seconds + 1]
    for event, until_s, recovered in zip(events, ends, recoveries(result), strict=True):
        span = [one for one in answers if event.at_s <= one.arrival_s < until_s]
        waits = [one.ttft_s for one in span if one.ttft_s is not None]
        row = [f"{event.at_s:.1f}", event.server, event.what]
        row += ["" if event.in_work is None else str(event.in_work)]
        row += [str(len(span)), str(sum(bool(one.failure) for one in span))]
        row += [f"{1e3 * max(waits):.0f}" if waits else "none"]
        row += [str(len(disturbed(span, event.at_s, result.limit_s)))]
        rows.append([*row, _NEVER if recovered is None else str(recovered)])
    return rows


def longest_recovery(result: Result) -> str:
    found = recoveries(result)
    return _NEVER if None in found else str(max((one or 0 for one in found), default=0))


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
        row(f"TTFT {name} (ms): calm, with faults, ratio", partial(_ttft, at=at))
    row("slowest TTFT (ms): calm, with faults", lambda r: _pair(r, lambda one: one.ttft_ms(1.0)))
    row(
        "disturbed seconds: calm, with faults",
        lambda r: _pair(r, lambda one: len(disturbed(one.answers, 0.0, r.limit_s)), " of {s:.0f}"),
    )
    row("longest recovery (s)", longest_recovery)
    row("encoder work lost (images)", _lost)
    return rows


def _ttft(result: Result, at: float) -> str:
    calm, chaos = result.calm.ttft_ms(at), result.chaos.ttft_ms(at)
    return f"{calm:.0f}, {chaos:.0f}, {_ratio(result, at):.2f}"


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
    fine = recovery != _NEVER and int(recovery) <= RECOVERY_S
    failed = len(result.calm.failed) + len(result.chaos.failed)
    aims = (
        ("no request fails", failed == 0, f"{failed} failed"),
        (f"p99 within {SLOWER:.0f} times", _ratio(result, 0.99) <= SLOWER, "see above"),
        (f"recovery within {RECOVERY_S:.0f} s of each event", fine, recovery),
    )
    return "; ".join(f"{name}: {'met' if met else f'missed ({why})'}" for name, met, why in aims)


def page(options: argparse.Namespace, results: dict[str, Result]) -> str:
    way = "register themselves" if options.dynamic else "are listed on its command line"
    notes = "".join(f"\n- {arm}: {note}" for arm, one in results.items() for note in one.notes)
    events = "\n\n".join(
        f"### {arm}\n\n{table(event_rows(result))}" for arm, result in results.items()
    )
    failures = failure_rows(results)
    aims = f"Aims: {verdicts(results['sglang-epd'])}.\n\n" if "sglang-epd" in results else ""
    return f"""# Encoders that are killed, frozen and told to go

{setting(options)} {ENCODERS} encoders, which {way}, and one language server. One
{options.size} px picture and {options.tokens} tokens a request, streamed, at random (Poisson)
moments, {options.load:.0%} of what the arm answered to {CAPACITY_CLIENTS} clients just before. No
picture comes twice, no cache is on.{_ORDER if len(results) > 1 else ""}

Times count from the moment a request was to be sent at; quantiles are of those that were
answered. A request without its answer in {ANSWER_TIMEOUT_S:.0f} s has failed. A second is
disturbed if a request that arrived in it failed, or a tenth of them waited more than
{SLOWER:.0f} times the calm p50 for the first token; an arm has recovered after the last of them
before the next event (a slow second by itself, later on, does not count: there are such in
peace). All servers share the machine's cores, which they would not in a cluster, so
{(_FORKS if options.forks else _NICE).format(options.restart_nice)}

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
    lines = []
    for second, answers in _by_second(run.answers, 0.0).items():
        waits = [1e3 * one.ttft_s for one in answers if one.ttft_s is not None]
        shown = f"{statistics.median(waits):.0f} {max(waits):.0f}" if waits else "- -"
        lines.append(f"{second} {len(answers)} {sum(bool(one.failure) for one in answers)} {shown}")
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        "requests": len(run.answers),
        "failures": Counter(one.failure for one in run.failed),
        "ttft_ms": {name: round(run.ttft_ms(at), 1) for name, at in quantiles.items()},
        "second requests failed ttft_p50_ms ttft_max_ms": lines,
    }
