"""HTTP caching of media: what a shared cache may remember, and for how long (RFC 9111).

Plain data: of each answer on the way to the media (redirects, then the media) the header
fields that caching depends on, and the conclusions from them. Wherever RFC 9111 leaves a
choice, or a server contradicts itself, the cautious reading holds: possibly private means
private, possibly stale means stale. Nothing is guessed: without an explicit lifetime an
answer is stale at once, and what is stale is not kept. Sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import Protocol, Self
from urllib.request import parse_http_list

# Why an answer is not kept. After the first four, simultaneous requests may not even
# share it.
NO_STORE = "no_store"
PRIVATE = "private"
SET_COOKIE = "set_cookie"
VARY = "vary"
STALE = "stale"  # when it came, or without a lifetime
TOO_LONG = "too_long"
STATUS = "status"  # none that says: these are the media
_NOT_SHARED = frozenset({NO_STORE, PRIVATE, SET_COOKIE, VARY})

_FIELDS = ("cache-control", "expires", "date", "age")
# Of the URLs of one trail: servers' answers must not fill the memory.
_MAX_CHARS = 4096
# RFC 9111, 1.2.2: a larger number of seconds stands for this one.
_MAX_SECONDS = 1 << 31
_SECONDS = re.compile(r"[0-9]+")


class Headers(Protocol):
    """An answer's header fields, several of a name among them; names in any case."""

    def getall(self, name: str, default: list[str]) -> list[str]: ...


@dataclass(frozen=True)
class Step:
    """One answer on the way to media.

    Attributes:
        url: the URL that was asked for.
        fresh_until: until then no request is needed, on `time.monotonic`.
        obstacle: why it may not be kept; empty if it may.
    """

    url: str
    fresh_until: float
    obstacle: str = ""

    @classmethod
    def of(cls, url: str, headers: Headers, *, sent: float, received: float, wall_s: float) -> Self:
        """Read the header fields of an answer.

        Args:
            sent, received: when it was asked for and when they came, on `time.monotonic`.
            wall_s: the time of day when they came, as of `time.time`.
        """
        fields = {}
        for name in _FIELDS:
            values = headers.getall(name, [])
            if values:
                fields[name] = ", ".join(values)
        return cls(url, *_judge(fields, headers, sent, received, wall_s))


@dataclass(frozen=True)
class Trail:
    """How media were come by: redirects, then the answer that was the media."""

    steps: tuple[Step, ...]

    def fresh(self, now: float) -> bool:
        """Whether no request is needed, on the clock of `time.monotonic`."""
        return self.fresh_until > now

    @property
    def fresh_until(self) -> float:
        return min(step.fresh_until for step in self.steps)

    def obstacle(self, now: float) -> str:
        """Why it may not be kept; empty if it may."""
        for step in self.steps:
            if step.obstacle:
                return step.obstacle
        if not self.fresh(now):
            return STALE
        return TOO_LONG if sum(len(step.url) for step in self.steps) > _MAX_CHARS else ""

    @property
    def shared(self) -> bool:
        """Whether simultaneous requests may share one answer."""
        return not any(step.obstacle in _NOT_SHARED for step in self.steps)


def _judge(
    fields: Mapping[str, str], headers: Headers, sent: float, received: float, wall_s: float
) -> tuple[float, str]:
    """Until when an answer is fresh, and why it may not be kept."""
    control = _directives(fields.get("cache-control", ""))
    lifetime_s = _lifetime_s(control, fields, wall_s)
    fresh_until = received + lifetime_s - _age_s(fields, received - sent, wall_s)
    if control is None or "no-store" in control:
        obstacle = NO_STORE
    elif "private" in control:
        obstacle = PRIVATE
    elif headers.getall("Set-Cookie", []):
        obstacle = SET_COOKIE
    elif _varies(headers.getall("Vary", [])):
        obstacle = VARY
    else:
        obstacle = ""
    return fresh_until, obstacle


def _directives(text: str) -> dict[str, list[str]] | None:
    """Cache-Control's directives and their values; None if its quotes do not match.

    A list of fields (`private="X-User"`) restricts the directive to them; here it is taken
    for all, as RFC 9111 allows.
    """
    found: dict[str, list[str]] = {}
    for part in parse_http_list(text):
        name, _, value = part.partition("=")
        if part.replace('\\"', "").count('"') % 2:
            return None
        found.setdefault(name.strip().lower(), []).append(value.strip().strip('"'))
    return found


def _lifetime_s(
    control: Mapping[str, list[str]] | None, fields: Mapping[str, str], wall_s: float
) -> float:
    """RFC 9111, 4.2.1, for a shared cache, without the heuristics of 4.2.2."""
    if control is None or "no-cache" in control:
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in control:
            return min(map(_read_seconds, control[name]))
    if "expires" not in fields:
        return 0.0
    expires_s = _read_date(fields["expires"])
    date_s = _read_date(fields.get("date", ""))
    if expires_s is None:
        return 0.0
    return min(expires_s - (wall_s if date_s is None else date_s), _MAX_SECONDS)


def _age_s(fields: Mapping[str, str], delay_s: float, wall_s: float) -> float:
    """RFC 9111, 4.2.3: how old an answer was when it came."""
    date_s = _read_date(fields.get("date", ""))
    apparent_s = 0.0 if date_s is None else max(0.0, wall_s - date_s)
    stated = fields.get("age")
    stated_s = 0.0
    if stated is not None:
        ages = [age.strip() for age in stated.split(",")]
        valid = all(map(_SECONDS.fullmatch, ages))
        stated_s = max(map(_read_seconds, ages)) if valid else _MAX_SECONDS
    return max(apparent_s, stated_s + delay_s)


def _read_seconds(text: str) -> float:
    """A number of seconds; 0 for an invalid one."""
    if not _SECONDS.fullmatch(text):
        return 0.0
    return float(min(int(text), _MAX_SECONDS) if len(text) <= 20 else _MAX_SECONDS)


def _read_date(text: str) -> float | None:
    try:
        parsed = parsedate_tz(text)
        return None if parsed is None else float(mktime_tz(parsed))
    except (ValueError, OverflowError, TypeError, IndexError):  # of an invalid date
        return None


def _varies(values: Iterable[str]) -> bool:
    """Whether the answer may differ for the next request, which has the same header fields."""
    return any(name.strip() == "*" for value in values for name in value.split(","))
