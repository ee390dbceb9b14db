"""Known URLs whose embeddings lie in a shared store alone: no download, unless it is needed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from encoder.site import BODY, Site
from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.store import SharedStore, StoreUrl
from sglang_epd.store.backend import StoreError
from sglang_epd.wire.http import ItemOutcome
from store.fakes import Counts, FakeBackend, written
from waiting import until

# Of a lookup: longer than a busy machine stands still, or short where a test waits for it.
TIMEOUT_S, SHORT_S = 10.0, 0.2


class Stored:
    """An encoder that keeps nothing itself, the site it reads from, and its store."""

    def __init__(
        self, service: Any, fakes: Any, site: Site, backend: FakeBackend, asking: Any
    ) -> None:
        self.service, self.fakes, self.site, self.backend = service, fakes, site, backend
        self.counts = Counts()
        self.store: SharedStore
        self._asking = asking
        self._asked = itertools.count()

    async def encode(self) -> ItemOutcome:
        request = self._asking(f"{self.site.url}/a", request_id=f"r{next(self._asked)}", ttl_s=5.0)
        (outcome,) = (await self.service.encode(request)).outcomes
        return outcome

    async def fill(self) -> bytes:
        """Have the site's picture encoded and stored; its key."""
        outcome = await self.encode()
        assert (outcome.state, outcome.source) == ("delivered", "computed")
        await written(self.counts)
        assert self.site.take() == ["/a"]
        self.fakes.preprocess.calls.clear()
        self.backend.calls.clear()
        return outcome.key

    def spoil(self) -> None:
        for name, data in self.backend.held.items():
            self.backend.held[name] = data[:-1] + bytes([data[-1] ^ 1])

    @property
    def gets(self) -> int:
        return sum(what == "get" for what, _name in self.backend.calls)


@pytest.fixture
async def stored(
    service_for: Any, fakes: Any, metrics: Any, site: Site, reader: Any, batch: Any, asking: Any
) -> AsyncIterator[Stored]:
    backend = FakeBackend()
    service = service_for(fakes)
    stored = Stored(service, fakes, site, backend, asking)
    url = StoreUrl.parse("file:///nowhere")
    store = stored.store = SharedStore(
        backend, url, token="", timeout_s=TIMEOUT_S, observer=stored.counts
    )
    service.urls = reader
    service.computations = Computations(
        [fakes], EmbeddingCache(0), metrics, batch=batch, store=store
    )
    yield stored
    backend.error = None
    backend.gate.set()
    await service.computations.close()
    await store.close()


async def test_what_is_stored_is_not_downloaded(stored: Stored) -> None:
    key = await stored.fill()
    again = await stored.encode()
    assert (again.state, again.source, again.key) == ("delivered", "stored", key)
    assert stored.site.take() == []
    assert not stored.fakes.preprocess.calls
    assert len(stored.fakes.batches) == 1
    assert stored.service.admission.nbytes == 0
    assert set(again.ms) >= {"acquire", "store"}


async def test_of_those_who_ask_at_once_one_asks_the_store(stored: Stored) -> None:
    await stored.fill()
    stored.backend.gate.clear()
    asking = [asyncio.create_task(stored.encode()) for _ in range(6)]
    await until(lambda: stored.gets)
    stored.backend.gate.set()
    outcomes = await asyncio.gather(*asking)
    assert {outcome.state for outcome in outcomes} == {"delivered"}
    assert sorted(outcome.source for outcome in outcomes) == ["coalesced"] * 5 + ["stored"]
    assert stored.gets == 1
    assert stored.site.take() == []


@pytest.mark.parametrize("fault", ["missing", "corrupt", "dead", "broken", "slow"])
async def test_what_the_store_does_not_give_is_downloaded(stored: Stored, fault: str) -> None:
    key = await stored.fill()
    backend = stored.backend
    match fault:
        case "missing":
            backend.held.clear()
        case "corrupt":
            stored.spoil()
        case "dead":
            backend.error = StoreError("down")
        case "broken":
            backend.error = RuntimeError("a bug in a library")
        case "slow":
            backend.gate.clear()
            stored.store._timeout_s = SHORT_S
    began = time.monotonic()
    outcomes = await asyncio.gather(*(stored.encode() for _ in range(4)))
    # Asked once and waited for once, then read once, whoever wants it.
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert {(outcome.state, outcome.key) for outcome in outcomes} == {("delivered", key)}
    assert sorted(outcome.source for outcome in outcomes) == ["coalesced"] * 3 + ["computed"]
    assert stored.gets == 1
    assert stored.site.take() == ["/a"]
    assert stored.fakes.preprocess.calls == [BODY]
    if fault == "corrupt":
        assert stored.counts.reads["corrupt"] == 1


async def test_a_store_that_is_left_alone_costs_a_known_url_nothing(stored: Stored) -> None:
    await stored.fill()
    stored.backend.error = StoreError("down")
    for _ in range(5):
        assert (await stored.encode()).source == "computed"
    stored.site.take()
    asked = stored.gets
    assert (await stored.encode()).state == "delivered"
    assert stored.site.take() == ["/a"]
    assert stored.gets == asked == 5


async def test_content_that_changed_is_not_taken_from_the_store(stored: Stored) -> None:
    stored.site.headers = []
    key = await stored.fill()
    stored.site.body = b"another"
    again = await stored.encode()
    assert (again.source, again.key == key) == ("computed", False)
    assert stored.fakes.preprocess.calls == [b"another"]


async def test_media_that_are_gone_when_they_are_needed_fail_that_item(stored: Stored) -> None:
    await stored.fill()
    stored.backend.held.clear()
    stored.site.answer = lambda _request: stored.site.response(status=404)
    outcome = await stored.encode()
    assert (outcome.state, outcome.code) == ("failed", "MediaError")
    assert "HTTP 404" in outcome.message
