from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from sglang_epd.media.freshness import (
    NO_STORE,
    PRIVATE,
    SET_COOKIE,
    STALE,
    TOO_LONG,
    VARY,
    Step,
    Trail,
)

URL = "http://media.example/a.png"
# When answers come: on the monotonic clock, and of the day.
RECEIVED, WALL = 1000.0, 1_900_000_000.0


def date(offset_s: float) -> str:
    return formatdate(WALL + offset_s, usegmt=True)


NOW = ("Date", date(0))


def step(*headers: tuple[str, str], delay_s: float = 0.0, url: str = URL) -> Step:
    times = {"sent": RECEIVED - delay_s, "received": RECEIVED, "wall_s": WALL}
    return Step.of(url, CIMultiDict(headers), **times)


def control(text: str, *others: tuple[str, str]) -> Step:
    return step(NOW, ("Cache-Control", text), *others)


def lifetime_s(answered: Step) -> float:
    return answered.fresh_until - RECEIVED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("max-age=60", 60),
        ("Max-Age=60", 60),
        ('max-age="60"', 60),
        ("public, max-age=60, immutable", 60),
        ("s-maxage=10, max-age=60", 10),
        ("max-age=60, s-maxage=0", 0),
        ("max-age=60, max-age=5", 5),
        ("max-age=60, no-cache", 0),
        ('max-age=60, no-cache="X-Field"', 0),
        ("max-age=60, must-revalidate, proxy-revalidate", 60),
        ("max-age=-1", 0),
        ("max-age=", 0),
        ("max-age", 0),
        ("max-age=1.5", 0),
        ("max-age=6O", 0),
        ("max-age=٦٠", 0),
        ("max-age=+60", 0),
        ("max-age=60;s-maxage=7", 0),
        ("max-age=99999999999", 1 << 31),
        ("max-age=" + "9" * 5000, 1 << 31),
        ('x="max-age=60"', 0),
        ('x="a, max-age=60"', 0),
        ("x=1, y, =, ,,", 0),
        ("stale-while-revalidate=60, stale-if-error=60", 0),
        ("", 0),
    ],
)
def test_the_lifetime_is_what_cache_control_says(text: str, seconds: float) -> None:
    answered = control(text)
    assert lifetime_s(answered) == seconds
    assert answered.obstacle == ""


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        ("no-store", NO_STORE),
        ("max-age=60, No-Store", NO_STORE),
        ("must-understand, no-store", NO_STORE),
        ("private, max-age=60", PRIVATE),
        ('private="X-User", max-age=60', PRIVATE),
        # What swallows the rest of the field may have swallowed a no-store.
        ('max-age=60, x="a, public', NO_STORE),
    ],
)
def test_what_may_not_be_kept(text: str, obstacle: str) -> None:
    assert control(text).obstacle == obstacle


def test_several_fields_of_a_name_are_one_list() -> None:
    several = step(NOW, ("Cache-Control", "max-age=60"), ("Cache-Control", "private"))
    assert several.obstacle == PRIVATE
    several = step(NOW, ("cache-control", "max-age=60"), ("CACHE-CONTROL", "s-maxage=9"))
    assert lifetime_s(several) == 9


@pytest.mark.parametrize(
    ("headers", "obstacle"),
    [
        ([("Set-Cookie", "a=b")], SET_COOKIE),
        ([("Vary", "*")], VARY),
        ([("Vary", "Accept-Encoding"), ("Vary", "Origin, *")], VARY),
        ([("Vary", "Accept-Encoding, Cookie")], ""),
        ([("Vary", "Origin"), ("Vary", "Access-Control-Request-Headers")], ""),
        ([("Vary", "accept-encoding, Accept-Encoding")], ""),
        ([("Vary", "")], ""),
    ],
)
def test_what_is_not_for_everybody_is_not_kept(
    headers: list[tuple[str, str]], obstacle: str
) -> None:
    assert control("max-age=60", *headers).obstacle == obstacle


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([NOW, ("Expires", date(30))], 30),
        ([("Expires", date(30))], 30),  # without a Date, from when it came
        ([("Date", date(-20)), ("Expires", date(30))], 30),  # 50 s long, 20 s old
        ([("Date", date(500)), ("Expires", date(530))], 30),  # a clock that goes before
        ([NOW, ("Expires", date(-30))], -30),
        ([NOW, ("Expires", "0")], 0),
        ([NOW, ("Expires", "-1")], 0),
        ([NOW, ("Expires", "Fri, 31 Dec 99999 23:59:59 GMT")], 0),
        ([("Date", "yesterday"), ("Expires", date(30))], 30),
        ([("Date", "yesterday"), ("Cache-Control", "max-age=60")], 60),
        ([NOW, ("Expires", date(30)), ("Cache-Control", "max-age=60")], 60),
        ([("Date", date(-86400 * 365)), ("Last-Modified", date(-86400 * 3650))], -86400 * 365),
    ],
)
def test_expires_counts_where_nothing_else_is_said(
    headers: list[tuple[str, str]], seconds: float
) -> None:
    assert lifetime_s(step(*headers)) == seconds


@pytest.mark.parametrize(
    ("headers", "delay_s", "seconds"),
    [
        ([NOW, ("Age", "20")], 0, 40),
        ([NOW, ("Age", "20")], 5, 35),
        ([NOW], 5, 55),
        ([("Date", date(-30)), ("Age", "20")], 5, 30),
        ([NOW, ("Age", "5, 20")], 0, 40),
        ([NOW, ("Age", "5"), ("Age", "50")], 0, 10),
        ([NOW, ("Age", "")], 0, 60 - (1 << 31)),
        ([NOW, ("Age", "-5")], 0, 60 - (1 << 31)),
        ([NOW, ("Age", "9" * 400)], 0, 60 - (1 << 31)),
    ],
)
def test_age_is_taken_off(headers: list[tuple[str, str]], delay_s: float, seconds: float) -> None:
    answered = step(*headers, ("Cache-Control", "max-age=60"), delay_s=delay_s)
    assert lifetime_s(answered) == seconds


def test_a_trail_is_as_good_as_its_worst_step() -> None:
    media = control("max-age=60")
    hop = step(NOW, ("Cache-Control", "max-age=10"))
    trail = Trail((hop, media))
    assert trail.fresh(RECEIVED + 9)
    assert not trail.fresh(RECEIVED + 10)
    assert trail.fresh_until == RECEIVED + 10
    assert trail.obstacle(RECEIVED) == ""
    for text, obstacle in (("no-store", NO_STORE), ("private", PRIVATE)):
        forbidden = Trail((control(text), media))
        assert forbidden.obstacle(RECEIVED) == obstacle
        assert not forbidden.shared


def test_what_is_stale_is_not_kept() -> None:
    bare = Trail((step(NOW),))
    assert bare.obstacle(RECEIVED) == STALE
    assert bare.shared
    fresh = control("max-age=60")
    assert Trail((fresh,)).obstacle(RECEIVED) == ""
    assert Trail((fresh,)).obstacle(RECEIVED + 60) == STALE
    # A redirect that states no lifetime.
    assert Trail((step(NOW), fresh)).obstacle(RECEIVED) == STALE


def test_what_is_kept_is_bounded() -> None:
    fresh = ("Cache-Control", "max-age=60")
    long_url = Trail((step(NOW, fresh, url=f"http://media.example/{'x' * 5000}"),))
    assert long_url.obstacle(RECEIVED) == TOO_LONG


_TEXT = st.text(max_size=40) | st.sampled_from(
    ["max-age=60", 'private="', "no-cache", '"\\', ",,,", "=", date(0), date(1e9), "1e9"]
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Cache-Control", "Expires", "Date", "Age", "Vary"]),
            _TEXT,
        )
    )
)
def test_no_header_field_is_an_error(headers: list[tuple[str, str]]) -> None:
    answered = step(*headers)
    assert answered.fresh_until <= RECEIVED + (1 << 31)
    Trail((answered,)).obstacle(RECEIVED)
