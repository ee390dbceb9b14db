"""Items that come by their URL: read, prepared and encoded no more often than they must be."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import Any

import pytest
from aiohttp import web

from encoder.site import BODY, Site
from encoder.towers import settle, until
from sglang_epd.encoder.pipeline import computations as module
from sglang_epd.errors import OverloadedError
from sglang_epd.wire.messages import Wait

PATIENCE_S = 5.0


@pytest.fixture
def capacity() -> int:
    return 1 << 20


@pytest.fixture
def encode(service, reader, site: Site, asking):
    """Encodes a site's URL; the item's outcome."""
    service.urls = reader
    asked = itertools.count(1)

    async def ask(path: str = "/a", **more: Any):
        request = asking(site.url + path, request_id=f"r{next(asked)}", ttl_s=PATIENCE_S, **more)
        (outcome,) = (await service.encode(request)).outcomes
        return outcome

    return ask


async def test_what_is_known_is_neither_read_nor_encoded_again(encode, fakes, site, cache) -> None:
    first = await encode()
    again = await encode()
    assert (first.state, first.source) == ("delivered", "computed")
    assert (again.state, again.source, again.key) == ("delivered", "cached", first.key)
    assert again.layout == first.layout
    assert site.take() == ["/a"]
    assert fakes.preprocess.calls == [BODY]
    assert len(fakes.batches) == 1
    assert len(fakes.payloads) == 2
    # Two URLs of one content are one embedding.
    assert (await encode("/b")).key == first.key
    assert len(cache) == 1


async def test_items_that_came_late_have_their_places_yet(service, fakes, asking, monkeypatch):
    fetch, here = fakes.fetch, {f"u{place}": asyncio.Event() for place in range(4)}

    async def fetch_late(source, deadline, account):
        await here[source.url].wait()
        return await fetch(source, deadline, account)

    monkeypatch.setattr(fakes, "fetch", fetch_late)
    fakes.forwarded.hold()
    encoding = asyncio.create_task(service.encode(asking(*here)))
    for place in (3, 2, 1, 0):
        here[f"u{place}"].set()
        await settle()
    fakes.forwarded.go_on()
    await encoding
    # One was being encoded, and one was prepared, when the others came.
    assert fakes.batches == [[b"u3"], [b"u2"], [b"u0"], [b"u1"]]


async def test_options_and_modality_make_another_embedding_of_one_content(
    encode, fakes, site
) -> None:
    keys = [
        (await encode()).key,
        (await encode(detail="high")).key,
        (await encode(modality="VIDEO")).key,
    ]
    assert len(set(keys)) == 3
    # Its bytes were needed each time.
    assert site.take() == ["/a"] * 3
    assert fakes.preprocess.calls == [BODY] * 3
    assert (await encode(detail="high")).source == "cached"
    assert site.take() == []


async def test_a_content_hash_is_compared_with_what_is_there_now(encode, fakes, site) -> None:
    right = f"sha256:{hashlib.sha256(BODY).hexdigest()}"
    first = await encode(content_hash=right)
    assert first.state == "delivered"
    # The embedding is at hand, and the media are read all the same.
    again = await encode(content_hash=right)
    assert (again.state, again.source, again.key) == ("delivered", "cached", first.key)
    wrong = await encode(content_hash=f"sha256:{'0' * 64}")
    assert (wrong.state, wrong.code) == ("failed", "MediaError")
    assert wrong.message == (
        f"the content hash does not match: expected sha256:{'0' * 64}, got {right}"
    )
    assert site.take() == ["/a"] * 3
    assert (await encode()).source == "cached"
    assert site.take() == []
    assert fakes.preprocess.calls == [BODY]


@pytest.mark.parametrize("capacity", [0])
async def test_without_a_cache_those_who_ask_at_once_share_it_all(encode, fakes, site) -> None:
    outcomes = await asyncio.gather(*(encode() for _ in range(6)))
    assert {outcome.state for outcome in outcomes} == {"delivered"}
    assert site.take() == ["/a"]
    assert len(fakes.batches) == 1
    assert (await encode()).source == "computed"
    assert site.take() == ["/a"]


async def test_known_media_take_none_of_the_bytes_that_may_be_in_work(
    encode, fakes, site, service
) -> None:
    await encode()
    fakes.offered.hold()
    asking = asyncio.create_task(encode())
    await until(lambda: len(fakes.offered.calls) == 2)
    assert service.admission.nbytes == 0
    fakes.offered.go_on()
    assert (await asking).state == "delivered"


async def test_an_embedding_that_goes_while_its_receiver_has_no_memory(
    encode, fakes, site, cache, monkeypatch
) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    first = await encode()
    fakes.answers[0] = Wait("ticket 2", 0)
    asking = asyncio.create_task(encode())
    await until(lambda: fakes.open and fakes.open[0][1].waits)
    await asyncio.sleep(0.01)
    assert cache.clear() == 1
    del fakes.answers[0]
    fakes.grant(0)
    again = await asking
    assert (again.state, again.source, again.key) == ("delivered", "computed", first.key)
    assert site.take() == ["/a"] * 2
    # The first grant was given back, and the item was offered anew.
    assert fakes.withdrawn == [0]
    assert len(fakes.payloads) == 2


async def test_known_media_that_are_gone_fail_that_item(encode, fakes, site, count) -> None:
    site.headers = []
    await encode()
    site.answer = lambda _request: web.Response(status=404)
    outcome = await encode()
    assert (outcome.state, outcome.code) == ("failed", "MediaError")
    assert "HTTP 404" in outcome.message
    assert count("fetch_failures_total", reason="http_4xx") == 1


async def test_slow_urls_leave_items_to_what_comes_inline(encode, asking, service, site) -> None:
    """A host that never answers has three quarters of the encoder's eight items."""
    silence = asyncio.Event()

    async def silent(_request: web.Request) -> web.Response:
        await silence.wait()
        return web.Response(status=404)

    site.answer = silent
    slow = [asyncio.create_task(encode(f"/{n}")) for n in range(6)]
    await until(lambda: service.admission.fetching == 6)
    with pytest.raises(OverloadedError, match="6 items being fetched, at most 6"):
        await encode("/seventh")
    (outcome,) = (await service.encode(asking(b"inline", request_id="inline"))).outcomes
    assert outcome.state == "delivered"
    silence.set()
    await asyncio.gather(*slow)
    assert (service.admission.fetching, service.admission.items) == (0, 0)


async def test_a_url_whose_media_are_here_is_being_fetched_no_more(encode, fakes, service) -> None:
    fakes.forwarded.hold()
    work = asyncio.create_task(encode())
    await asyncio.wait_for(fakes.forwarded.entered.wait(), PATIENCE_S)
    assert (service.admission.fetching, service.admission.items) == (0, 1)
    fakes.forwarded.go_on()
    assert (await work).state == "delivered"
