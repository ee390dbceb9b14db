from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from encoder.site import Site, serving
from integrity import check_cache
from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.service import EncoderService, Room
from sglang_epd.encoder.tower import Prepared
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.errors import EpdError
from sglang_epd.media import Account, FetchedMedia, MediaFetcher, MediaLimits, MediaSource, digest
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.transfer.delivery import Delivery, Granted, GrantLostError, Offered
from sglang_epd.wire.http import EncodeItem, EncodeReply, EncodeRequest, ReplyTo
from sglang_epd.wire.messages import Decline, Grant, Inline, Layout, Offer, TensorSpec, Wait

NAMESPACE = "Model/float32/0123456789abcdef"
ROWS, WIDTH = 3, 4
MAX_BYTES = 8 << 20


class Stage:
    """One step of the fakes: counts, may be held up, and may fail for some items."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failures: dict[Any, BaseException] = {}
        self.entered = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def __call__(self, what: Any) -> None:
        self.calls.append(what)
        self.entered.set()
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            for _ in range(5):  # tidying up takes a moment
                await asyncio.sleep(0)
            raise
        if what in self.failures:
            raise self.failures[what]


class Fakes:
    """The service's tower, fetcher and sender at once; media are named by their bytes.

    Attributes:
        answers: what an offer of an item is answered; a grant where nothing is said.
        lost: how many grants of an item will turn out to be void.
        open: the offers that are open, in the order they were made.
        withdrawn: items whose grant was not used.
    """

    alive = True
    preparers = 4
    depth = 1
    weights_bytes = 0

    def __init__(self) -> None:
        self.acquire = Stage()
        self.preprocess = Stage()
        self.offered = Stage()
        self.forwarded = Stage()
        self.delivered = Stage()
        self.answers: dict[int, Wait | Decline | EpdError] = {}
        self.lost: dict[int, int] = {}
        self.offers: list[Offer] = []
        self.open: list[tuple[Offer, Offered]] = []
        self.withdrawn: list[int] = []
        self.payloads: list[tuple[str, Grant, torch.Tensor]] = []
        self.begun: list[tuple[int, int]] = []
        self.tell: Any = None
        self.batches: list[list[bytes]] = []
        self.options: list[Any] = []
        self._grants = 0
        self._prepared: list[tuple[bytes, weakref.ref[Prepared]]] = []

    # MediaFetcher

    async def fetch(self, source: MediaSource, deadline: float, account: Account) -> FetchedMedia:
        data = source.data if source.data is not None else (source.url or "").encode()
        if source.data is None:
            await account.grow(len(data))
        await self.acquire(data)
        return FetchedMedia(data, digest(data))

    # Tower

    @property
    def pixels(self) -> list[bytes]:
        """The media whose pixels are in memory."""
        return [data for data, prepared in self._prepared if prepared() is not None]

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        self.options.append(options)
        await self.preprocess(data)
        spec = TensorSpec("float32", (ROWS, WIDTH))
        prepared = Prepared(Layout(modality, spec, [[1, 2, 6]]), 12, modality, data)
        self._prepared.append((data, weakref.ref(prepared)))
        return prepared

    def discard(self, prepared: Prepared) -> None:
        pass

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        self.batches.append([prepared.content for prepared in batch])
        self.tell = tell
        for prepared in batch:
            await self.forwarded(prepared.content)
        return [torch.full((ROWS, WIDTH), float(len(one.content))) for one in batch]

    # Sender

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        opened = offer, Offered(offer.nbytes)
        self.offers.append(offer)
        self.open.append(opened)
        answering = asyncio.create_task(self._answer(*opened))
        try:
            await asyncio.sleep(0)  # the answer is there at once, unless it is held
            yield opened[1]
        finally:
            self.open.remove(opened)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            if opened[1].granted is not None and not opened[1].granted.used:
                self.withdrawn.append(offer.item)

    async def begin(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, rows: int, timeout_s: float
    ) -> None:
        self.begun.append((granted.message.item, rows))
        if self.lost.get(granted.message.item):
            self.lost[granted.message.item] -= 1
            granted.used = True
            raise GrantLostError

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        granted.used = True
        grant = granted.message
        await self.delivered(grant.item)
        if self.lost.get(grant.item):
            self.lost[grant.item] -= 1
            raise GrantLostError
        self.payloads.append((endpoint, grant, embedding))
        return "inline"

    def grant(self, item: int) -> None:
        """There is memory for an item that waits."""
        ((offer, offered),) = [opened for opened in self.open if opened[0].item == item]
        assert offered.waits
        self._grant(offer, offered)

    async def _answer(self, offer: Offer, offered: Offered) -> None:
        await self.offered(offer.item)
        answer = self.answers.get(offer.item)
        if isinstance(answer, EpdError):
            offered.fail(answer)
        elif answer is not None:
            offered.answer(answer)
        else:
            self._grant(offer, offered)

    def _grant(self, offer: Offer, offered: Offered) -> None:
        self._grants += 1
        offered.answer(Grant(offer.ticket, offer.item, self._grants, 30.0, Inline()))


@pytest.fixture
async def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def metrics() -> EncoderMetrics:
    return EncoderMetrics()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


@pytest.fixture
async def reader(metrics: EncoderMetrics) -> AsyncIterator[UrlReader]:
    """Reads the site's URLs, and remembers four of them."""
    async with MediaFetcher(MediaLimits(allowed_networks=("127.0.0.0/8",))) as fetcher:
        reader = UrlReader(fetcher, UrlMemory(4), metrics)
        yield reader
        await reader.close()


@pytest.fixture
def batch() -> BatchBounds:
    """One item is run at a time, and one more may be ready meanwhile."""
    return BatchBounds(patches=1 << 20, items=1)


@pytest.fixture
def capacity() -> int:
    return 0


@pytest.fixture
def cache(capacity: int, metrics: EncoderMetrics) -> EmbeddingCache:
    return EmbeddingCache(capacity, on_evict=metrics.evicted)


@pytest.fixture
async def computations(
    fakes: Fakes, cache: EmbeddingCache, metrics: EncoderMetrics, batch: BatchBounds
) -> AsyncIterator[Computations]:
    computations = Computations([fakes], cache, metrics, batch=batch)
    yield computations
    fakes.preprocess.go_on()
    fakes.forwarded.go_on()
    await computations.close()
    check_cache(cache)


class Asked(EncoderService):
    """The service, with the room of a request around each call."""

    async def encode(
        self,
        request: EncodeRequest,
        room: Room | None = None,
        span: Span = OFF,
        delivery: Delivery | None = None,
    ) -> EncodeReply:
        with self.receiving() as own:
            return await super().encode(request, room or own, span, delivery)


@pytest.fixture
def service_for(
    fakes: Fakes, metrics: EncoderMetrics, computations: Computations
) -> Callable[..., EncoderService]:
    """A service with this sender and namespace."""

    def make(sender: Any, namespace: str = NAMESPACE) -> EncoderService:
        return Asked(
            computations=computations,
            urls=UrlReader(fakes, UrlMemory(0), metrics),
            sender=sender,
            admission=Admission(max_items=8, max_bytes=MAX_BYTES),
            metrics=metrics,
            namespace=namespace,
            name="http://encoder:1",
        )

    return make


@pytest.fixture
def service(service_for: Callable[..., EncoderService], fakes: Fakes) -> EncoderService:
    return service_for(fakes)


@pytest.fixture
def count(metrics: EncoderMetrics) -> Callable[..., float]:
    """One sample of the metrics; 0 where there is none yet."""

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"sglang:epd_encoder_{name}", labels) or 0.0

    return value


@pytest.fixture
def asking() -> Callable[..., EncodeRequest]:
    """A request for some media: their bytes, or their URL."""

    def request(
        *media: bytes | str,
        request_id: str = "r1",
        ttl_s: float = 30.0,
        namespace: str = NAMESPACE,
        modality: str = "IMAGE",
        content_hash: str = "",
        **options: Any,
    ) -> EncodeRequest:
        items = [
            EncodeItem(
                n,
                modality,
                f"image {n + 1} of {len(media)}",
                data=one if isinstance(one, bytes) else None,
                url=one if isinstance(one, str) else None,
                options=options,
                content_hash=content_hash,
            )
            for n, one in enumerate(media)
        ]
        reply_to = ReplyTo("tcp://receiver:1", "the-secret-ticket")
        return EncodeRequest(request_id, namespace, ttl_s, reply_to, items)

    return request
