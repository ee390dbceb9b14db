"""Reads media by their URLs, and asks for none that it knows.

`media.freshness` decides what may be remembered, and `cache.urls` remembers it; this file sends
the requests. Simultaneous requests for a URL share one fetch, which lives as long as one of them
waits for it, and each waits as long as its own deadline lets it. A URL that is fresh costs
nothing where its content's embedding is at hand; any other is read.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_epd.cache.urls import UrlMemory, name_of
from sglang_epd.errors import MediaError
from sglang_epd.media import Arrival, FetchedMedia, Fetcher, MediaSource, parse, reading_until
from sglang_epd.observability.encoder import EncoderMetrics

_CREDENTIALS = "credentials"
# A fetch that has a turn of its own begins within that.
_BEGIN_S = 0.1


@dataclass(frozen=True)
class Content:
    """What a URL led to, or inline media.

    Attributes:
        digest: of the bytes.
        data: the bytes; None where they were not needed.
    """

    digest: bytes
    data: bytes | None = None


@dataclass(eq=False)
class _Flight:
    """One request that several wait for."""

    name: bytes
    task: asyncio.Task[FetchedMedia]
    # Counts the bytes for all of them.
    arrival: Arrival
    askers: int = 0
    # Whether an uncacheable response was already given to one caller.
    taken: bool = False

    @property
    def begun(self) -> bool:
        return self.arrival.nbytes > 0 or self.task.done()


class UrlReader:
    """Reads URLs, remembering what it may; one for a process and event loop.

    Args:
        fetcher: sends requests, and applies the rules of fetching.
        memory: of URLs.
        metrics: counts their outcomes.
    """

    def __init__(self, fetcher: Fetcher, memory: UrlMemory, metrics: EncoderMetrics) -> None:
        self._fetcher = fetcher
        self.memory = memory
        self._metrics = metrics
        self._flights: dict[bytes, _Flight] = {}
        # How often all was forgotten.
        self._forgotten = 0

    async def read(
        self,
        source: MediaSource,
        deadline: float,
        at_hand: Callable[[bytes], bool],
        arrival: Arrival,
    ) -> Content:
        """Find the content of a URL, or hash inline media.

        Args:
            deadline: the asker's, in seconds of `time.monotonic()`.
            at_hand: whether the embedding of content with this digest is there, or may
                be, so that its bytes are not needed now.
            arrival: of the item. Bytes that several wait for are counted in one beside it.

        Raises:
            MediaError: it cannot be read, or may not be, now.
            DeadlineError: the deadline passed first.
        """
        async with reading_until(deadline, source):
            url = self._rememberable(source.url or "")
            if url is None:
                media = await self._fetcher.fetch(source, deadline, arrival)
                return Content(media.digest, media.data)
            known = self.memory.find(name_of(url))
            if known and known.trail.fresh(time.monotonic()) and at_hand(known.digest):
                # The limits of now decide, not those of then.
                self._fetcher.check(known.trail, known.nbytes)
                self._count("fresh")
                return Content(known.digest)
            media = await self._share(source, url, arrival)
            return Content(media.digest, media.data)

    def forget(self) -> int:
        """Forget all URLs, and let nothing that is on its way be remembered, or joined; how many
        were remembered."""
        self._flights.clear()
        self._forgotten += 1
        return self.memory.clear()

    async def close(self) -> None:
        """Cancel the fetches in flight."""
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights.values()), return_exceptions=True)

    def _rememberable(self, text: str) -> str | None:
        """The URL as it is asked for; None where nothing may be remembered of it."""
        try:
            url = parse(text)
        except MediaError:  # its fault is reported where it is read
            return None
        if url.scheme not in ("http", "https"):
            return None
        if url.raw_user is not None or url.raw_password is not None:
            self._metrics.url_uncacheable.labels(_CREDENTIALS).inc()
            return None
        return str(url.with_fragment(None))

    async def _share(
        self, source: MediaSource, url: str, arrival: Arrival, passed: _Flight | None = None
    ) -> FetchedMedia:
        """Fetch a URL, or wait for the fetch in flight, unless its answer is not for several.

        Args:
            passed: a fetch in flight that does not do.
        """
        name = name_of(url)
        flight = self._flights.get(name)
        flight = None if flight is passed else flight
        joined = flight is not None
        if flight is None:
            shared = arrival.beside()
            asking = asyncio.create_task(self._ask(source, name, shared))
            flight = self._flights[name] = _Flight(name, asking, shared)
            flight.task.add_done_callback(lambda _task: self._land(flight))
        flight.askers += 1
        waits = gave_way = False
        try:
            waits = joined and await self._waits_for_its_own(flight, arrival)
            if not waits:
                media = await asyncio.shield(flight.task)
                alone = flight.taken and not media.trail.shared
                if not alone:
                    arrival.share(flight.arrival)
        except MediaError as error:
            gave_way = joined and error.reason == "slow"
            if not gave_way:
                # One of its own for each: an exception that is kept keeps the frames it
                # went through.
                raise copy.copy(error) from None
        finally:
            flight.askers -= 1
            if not flight.askers:
                flight.task.cancel()
                self._land(flight)  # later callers must not wait for its end
        if waits:
            return await self._share(source, url, arrival, flight)
        if gave_way:
            # For the many fetches of the request that began it.
            return await self._share(source, url, arrival)
        if alone:
            self._count("missed")
            return await self._fetcher.ask(source, arrival)
        flight.taken = True
        if joined:
            self._count("coalesced")
        return media

    async def _waits_for_its_own(self, flight: _Flight, arrival: Arrival) -> bool:
        """Whether a fetch waits until others of the request that began it have ended, for which
        another request has no reason to wait."""
        owner = flight.arrival.owner
        if owner == arrival.owner or flight.begun:
            return False
        await asyncio.wait([flight.task], timeout=_BEGIN_S)
        others = (one for one in self._flights.values() if one.arrival.owner == owner)
        return not flight.begun and any(one.begun for one in others)

    async def _ask(self, source: MediaSource, name: bytes, arrival: Arrival) -> FetchedMedia:
        """Fetch a URL, and remember the answer as far as it may be."""
        began = self._forgotten
        try:
            media = await self._fetcher.ask(source, arrival)
        except MediaError as error:
            if error.reason == "http_4xx":  # it is gone, or no longer for everybody
                self.memory.drop(name)
            raise
        arrival.settle(len(media.data))
        obstacle = media.trail.obstacle(time.monotonic())
        if obstacle:
            self._metrics.url_uncacheable.labels(obstacle).inc()
            self.memory.drop(name)
        elif began == self._forgotten:
            self.memory.keep(name, media.digest, len(media.data), media.trail)
        self._count("missed")
        return media

    def _land(self, flight: _Flight) -> None:
        if self._flights.get(flight.name) is flight:
            del self._flights[flight.name]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # no caller may be left to hear of it
        if flight.task.done() and not flight.askers:
            flight.arrival.close()

    def _count(self, outcome: str) -> None:
        self._metrics.url_lookups.labels(outcome).inc()
