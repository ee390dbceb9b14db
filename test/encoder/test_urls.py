from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from encoder.site import BODY, FRESH, Site
from encoder.towers import until
from media.samples import in_seconds, local_limits
from sglang_epd.cache import UrlMemory
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.urls import Content, UrlReader
from sglang_epd.errors import (
    DeadlineError,
    MediaError,
    MediaForbiddenError,
    MediaTooLargeError,
)
from sglang_epd.media import Intake, MediaFetcher, MediaLimits, MediaSource, digest, slots

PATIENCE_S = 5.0


class Asker:
    """Reads a site's URLs; content it was given once is at hand unless it is evicted."""

    def __init__(self, reader: UrlReader, site: Site) -> None:
        self.reader = reader
        self._site = site
        self.held: set[bytes] = set()
        self.admission = Admission(1, 1 << 30)
        self.intake = Intake(self.admission)
        self.most_bytes = 0

    async def __call__(self, path: str = "/a", timeout_s: float = PATIENCE_S) -> Content:
        source = MediaSource(url=self._site.url + path)
        with self.intake.arrival((0, 0)) as arrival:
            content = await self.reader.read(
                source, in_seconds(timeout_s), self.held.__contains__, arrival
            )
            await asyncio.sleep(0)  # others have it, too
            self.most_bytes = max(self.most_bytes, self.admission.nbytes)
        if content.data is not None:
            assert digest(content.data) == content.digest
            self.held.add(content.digest)
        return content


@pytest.fixture
def ask(reader: UrlReader, site: Site) -> Asker:
    return Asker(reader, site)


@pytest.fixture
def counted(count):
    def outcomes(metric: str = "url_lookups", label: str = "outcome") -> dict[str, float]:
        names = {
            "outcome": ("fresh", "missed", "coalesced"),
            "reason": (
                *("no_store", "private", "set_cookie", "vary", "stale"),
                *("too_long", "status", "credentials"),
            ),
        }[label]
        values = {name: count(f"{metric}_total", **{label: name}) for name in names}
        return {name: value for name, value in values.items() if value}

    return outcomes


WHOLE = Content(digest(BODY), BODY)
KNOWN = Content(digest(BODY))


# One asker


async def test_a_fresh_url_is_not_asked_for(ask: Asker, site: Site, counted) -> None:
    assert (await ask(), site.take()) == (WHOLE, ["/a"])
    for _ in range(3):
        assert await ask() == KNOWN
    assert (await ask("/a#part"), site.take()) == (KNOWN, [])
    assert counted() == {"missed": 1, "fresh": 4}


async def test_a_stale_url_is_read_again(ask: Asker, site: Site, counted) -> None:
    site.headers = [("Cache-Control", "max-age=1")]
    assert await ask() == WHOLE
    await asyncio.sleep(1.1)
    site.body, site.headers = b"another", FRESH
    assert await ask() == Content(digest(b"another"), b"another")
    assert (await ask(), site.take()) == (Content(digest(b"another")), ["/a", "/a"])
    assert counted() == {"missed": 2, "fresh": 1}


async def test_a_url_without_a_lifetime_is_read_each_time(ask: Asker, site: Site, counted) -> None:
    site.headers = [("ETag", '"v1"')]
    for _ in range(2):
        assert (await ask(), site.take()) == (WHOLE, ["/a"])
    assert counted("url_uncacheable", "reason") == {"stale": 2}


async def test_without_its_embedding_it_is_read(ask: Asker, site: Site, counted) -> None:
    await ask()
    ask.held.clear()
    assert (await ask(), site.take()) == (WHOLE, ["/a"] * 2)
    assert counted() == {"missed": 2}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (("Cache-Control", "no-store"), "no_store"),
        (("Cache-Control", "private, max-age=60"), "private"),
        (("Set-Cookie", "session=1"), "set_cookie"),
        (("Vary", "*"), "vary"),
    ],
)
async def test_what_is_not_for_everybody_is_not_remembered(
    ask: Asker, site: Site, counted, header: tuple[str, str], reason: str
) -> None:
    site.headers = [*FRESH, header]
    for _ in range(2):
        assert (await ask(), site.take()) == (WHOLE, ["/a"])
    assert len(ask.reader.memory) == 0
    assert counted("url_uncacheable", "reason") == {reason: 2}
    # Nor is it from now on what had been.
    site.headers = FRESH
    await ask()
    assert len(ask.reader.memory) == 1
    site.headers = [*FRESH, header]
    ask.held.clear()
    assert await ask() == WHOLE
    assert len(ask.reader.memory) == 0


async def test_credentials_in_a_url_are_not_remembered(ask: Asker, site: Site, counted) -> None:
    site.url = site.url.replace("http://", "http://user:secret@")
    for _ in range(2):
        assert (await ask(), site.take()) == (WHOLE, ["/a"])
    assert len(ask.reader.memory) == 0
    assert counted("url_uncacheable", "reason") == {"credentials": 2}


@pytest.mark.parametrize("status", [203, 206])
async def test_only_what_is_the_media_is_remembered(ask: Asker, site: Site, status: int) -> None:
    site.headers = [("Cache-Control", "max-age=60")]
    site.answer = lambda _request: site.response(body=BODY, status=status)
    for _ in range(2):
        assert await ask() == WHOLE
    assert len(ask.reader.memory) == 0


# Redirects


def _redirecting(site: Site, *, fresh: bool) -> None:
    def answer(request: web.Request) -> web.Response:
        if request.path != "/a":
            return site.response(body=site.body)
        headers = {"Location": "/b"} | (dict(FRESH) if fresh else {})
        return web.Response(status=302, headers=headers)

    site.answer = answer


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_redirect_has_a_lifetime_of_its_own(ask: Asker, site: Site, fresh: bool) -> None:
    _redirecting(site, fresh=fresh)
    assert (await ask(), site.take()) == (WHOLE, ["/a", "/b"])
    assert (await ask(), site.take()) == ((KNOWN, []) if fresh else (WHOLE, ["/a", "/b"]))


async def test_a_redirect_that_leads_elsewhere_now(ask: Asker, site: Site) -> None:
    _redirecting(site, fresh=False)
    await ask()
    site.take()
    site.answer = lambda request: (
        web.Response(status=307, headers={"Location": "/c"})
        if request.path == "/a"
        else site.response(body=b"another")
    )
    assert await ask() == Content(digest(b"another"), b"another")
    assert site.take() == ["/a", "/c"]


# What goes wrong


@pytest.mark.parametrize(
    ("status", "reason"),
    [(404, "http_4xx"), (403, "http_4xx"), (410, "http_4xx"), (503, "http_5xx")],
)
async def test_what_is_gone_is_forgotten_and_a_server_in_trouble_is_not(
    ask: Asker, site: Site, status: int, reason: str
) -> None:
    await ask()
    ask.held.clear()
    site.answer = lambda _request: web.Response(status=status)
    with pytest.raises(MediaError, match=f"HTTP {status}") as caught:
        await ask()
    assert caught.value.reason == reason
    assert len(ask.reader.memory) == (reason == "http_5xx")


async def test_a_server_that_drips_ends_at_the_time_limit(metrics, site: Site) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.01)

    async with MediaFetcher(local_limits(total_timeout_s=0.2)) as fetcher:
        ask = Asker(UrlReader(fetcher, UrlMemory(4), metrics), site)
        site.answer = drip
        began = time.monotonic()
        answers = await asyncio.gather(*(ask() for _ in range(5)), return_exceptions=True)
        assert time.monotonic() - began < PATIENCE_S
        assert {getattr(answer, "reason", None) for answer in answers} == {"timeout"}
        assert len(set(map(id, answers))) == 5
        site.answer = None
        assert await ask() == WHOLE


# What may be read


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"allowed_domains": ("media.example",)}, MediaForbiddenError),
        ({"allowed_networks": ()}, MediaForbiddenError),
        ({"max_bytes": 100}, MediaTooLargeError),
        ({"max_redirects": 0}, MediaError),
    ],
)
async def test_what_may_be_read_is_decided_when_it_is_used(
    metrics, ask: Asker, site: Site, limits: dict[str, Any], error: type[MediaError]
) -> None:
    _redirecting(site, fresh=True)
    await ask()
    assert await ask() == KNOWN
    site.take()
    stricter = MediaLimits(**{"allowed_networks": ("127.0.0.0/8",), **limits})
    async with MediaFetcher(stricter) as fetcher:
        other = Asker(UrlReader(fetcher, ask.reader.memory, metrics), site)
        other.held = ask.held
        with pytest.raises(error) as caught:
            await other()
    assert type(caught.value) is error
    assert site.take() == []


async def test_a_local_file_is_none_of_its_business(ask: Asker, site: Site) -> None:
    site.url = "file:///etc"
    with pytest.raises(MediaForbiddenError, match="local files"):
        await ask("/hostname")
    site.url = "http://["
    with pytest.raises(MediaError, match="malformed"):
        await ask("/a")


# Several askers


@pytest.mark.parametrize("known", [True, False])
async def test_fifty_who_ask_at_once_share_a_request(
    ask: Asker, site: Site, counted, known: bool
) -> None:
    if known:
        await ask()
        site.take()
        ask.held.clear()
    site.gate.clear()
    asking = [asyncio.create_task(ask()) for _ in range(50)]
    await until(lambda: len(site.asked) == 1)
    site.gate.set()
    assert set(await asyncio.gather(*asking)) == {WHOLE}
    assert site.take() == ["/a"]
    assert counted()["coalesced"] == 49
    assert ask.most_bytes == len(BODY)
    assert ask.admission.nbytes == 0


@pytest.mark.parametrize("asked_later", [False, True])
async def test_what_is_on_its_way_when_all_is_forgotten_is_not_remembered(
    ask: Asker, site: Site, asked_later: bool
) -> None:
    """The content may have been replaced meanwhile, and who asks later is to have the new one."""
    site.gate.clear()
    asking = [asyncio.create_task(ask())]
    await until(lambda: len(site.asked) == 1)
    assert ask.reader.forget() == 0
    if asked_later:
        asking.append(asyncio.create_task(ask()))
        await until(lambda: len(site.asked) == 2)
    site.gate.set()
    assert set(await asyncio.gather(*asking)) <= {WHOLE, KNOWN}
    assert len(ask.reader.memory) == asked_later


def asking(reader: UrlReader, site: Site) -> Callable[[str, int], asyncio.Task[Content]]:
    """Begins to read a path for a request, by the request's number."""
    intake = Intake(Admission(1, 1 << 30))

    async def read(path: str, request: int) -> Content:
        source = MediaSource(url=site.url + path)
        with intake.arrival((request, 0)) as arrival:
            return await reader.read(source, in_seconds(PATIENCE_S), lambda _digest: False, arrival)

    return lambda path, request: asyncio.create_task(read(path, request))


async def test_who_joined_a_fetch_that_makes_way_fetches_for_itself(
    metrics, site: Site, monkeypatch
) -> None:
    """A request of many slow fetches gives them up where others wait, and so not another's."""
    monkeypatch.setattr(slots, "GRACE_S", 0.1)
    async with MediaFetcher(local_limits(total_timeout_s=PATIENCE_S), concurrency=4) as fetcher:
        ask = asking(UrlReader(fetcher, UrlMemory(4), metrics), site)
        site.gate.clear()
        greedy, another = ask("/a", 0), ask("/b", 0)
        await until(lambda: len(site.asked) == 2)
        joined = ask("/a", 1)
        others = [ask(f"/{name}", 2) for name in "cde"]
        with pytest.raises(MediaError, match="too slowly while other media waited"):
            await greedy
        site.gate.set()
        assert {await one for one in (joined, *others)} == {WHOLE}
        await asyncio.gather(another, return_exceptions=True)
        assert site.asked.count("/a") == 2


async def test_who_would_join_a_fetch_in_anothers_queue_fetches_for_itself(
    metrics, site: Site, monkeypatch
) -> None:
    """Of a request's many, half at most are under way: the rest would hold others up."""
    monkeypatch.setattr(slots, "GRACE_S", 60.0)
    async with MediaFetcher(local_limits(total_timeout_s=PATIENCE_S), concurrency=4) as fetcher:
        ask = asking(UrlReader(fetcher, UrlMemory(8), metrics), site)
        site.gate.clear()
        album = [ask(f"/{name}", 0) for name in "abcd"]
        await until(lambda: len(site.asked) == 2)
        others = [ask("/d", 1), ask("/d", 1), ask("/d", 2)]
        await until(lambda: len(site.asked) == 3)
        await asyncio.sleep(0.3)
        assert sorted(site.asked) == ["/a", "/b", "/d"], "it is in nobody's queue, and once there"
        site.gate.set()
        assert {(await one).digest for one in [*others, *album]} == {digest(BODY)}


async def test_requests_that_wait_for_a_place_wait_for_one_fetch(
    metrics, site: Site, monkeypatch
) -> None:
    monkeypatch.setattr(slots, "GRACE_S", 60.0)
    async with MediaFetcher(local_limits(total_timeout_s=PATIENCE_S), concurrency=2) as fetcher:
        ask = asking(UrlReader(fetcher, UrlMemory(8), metrics), site)
        site.gate.clear()
        full = [ask("/a", 0), ask("/b", 1)]
        await until(lambda: len(site.asked) == 2)
        same = [ask("/c", owner) for owner in range(2, 20)]
        await asyncio.sleep(0.5)
        site.gate.set()
        assert {(await one).digest for one in [*full, *same]} == {digest(BODY)}
        assert sorted(site.asked) == ["/a", "/b", "/c"]


async def test_what_is_for_one_is_not_shared(ask: Asker, site: Site) -> None:
    site.headers = [("Cache-Control", "no-store")]
    answers = await asyncio.gather(*(ask() for _ in range(5)))
    assert set(answers) == {WHOLE}
    assert site.take() == ["/a"] * 5


async def test_the_first_asker_may_leave(ask: Asker, site: Site) -> None:
    site.gate.clear()
    first = asyncio.create_task(ask())
    await until(lambda: len(site.asked) == 1)
    others = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    site.gate.set()
    assert await asyncio.gather(*others) == [WHOLE] * 3
    assert site.take() == ["/a"]


@pytest.mark.parametrize("ticks", range(6))
async def test_the_last_asker_takes_the_request_along(ask: Asker, site: Site, ticks: int) -> None:
    site.gate.clear()
    askers = [asyncio.create_task(ask()) for _ in range(3)]
    await until(lambda: len(site.asked) == 1)
    for asker in askers:
        asker.cancel()
    # Who comes then is not told that it was cancelled.
    for _ in range(ticks):
        await asyncio.sleep(0)
    late = asyncio.create_task(ask())
    await asyncio.gather(*askers, return_exceptions=True)
    site.gate.set()
    assert await late == WHOLE
    assert not ask.reader._flights


async def test_each_asker_has_its_own_deadline(ask: Asker, site: Site) -> None:
    site.gate.clear()
    patient = asyncio.create_task(ask())
    hasty = asyncio.create_task(ask(timeout_s=0.05))
    with pytest.raises(DeadlineError, match="deadline passed while reading"):
        await hasty
    with pytest.raises(DeadlineError):
        await ask(timeout_s=0)
    site.gate.set()
    assert await patient == WHOLE
    assert len(site.take()) == 1


async def test_a_failure_is_each_askers_own(ask: Asker, site: Site) -> None:
    site.answer = lambda _request: web.Response(status=404)
    errors = await asyncio.gather(*(ask() for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in errors] == [MediaError] * 3
    assert {error.reason for error in errors if isinstance(error, MediaError)} == {"http_4xx"}
    assert len(set(map(id, errors))) == 3
    assert len(site.take()) == 1


async def test_closing_ends_what_is_on_its_way(ask: Asker, site: Site) -> None:
    site.gate.clear()
    asker = asyncio.create_task(ask())
    await until(lambda: len(site.asked) == 1)
    await ask.reader.close()
    with pytest.raises(asyncio.CancelledError):
        await asker


async def test_the_memory_is_bounded(ask: Asker) -> None:
    for n in range(10):
        await ask(f"/{n}")
    assert len(ask.reader.memory) == 4
