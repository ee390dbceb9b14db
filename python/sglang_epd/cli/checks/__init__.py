"""The checks of `sglang-epd doctor`, a file a subject. A check is a function that yields
findings and raises nothing; each wait in one has a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # something that one can live without is not there
    WARN = "warn"  # it will run, but not as it should
    FAIL = "fail"  # it will not run


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` is empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    found: str
    mend: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, Verdict.OK, found)


def note(subject: str, found: str, mend: str = "") -> Finding:
    return Finding(subject, Verdict.NOTE, found, mend)


def warn(subject: str, found: str, mend: str) -> Finding:
    return Finding(subject, Verdict.WARN, found, mend)


def fail(subject: str, found: str, mend: str) -> Finding:
    return Finding(subject, Verdict.FAIL, found, mend)
