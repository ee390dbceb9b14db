from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_epd.encoder.engine import Prepared
from sglang_epd.encoder.service import EncoderService
from sglang_epd.errors import EpdError
from sglang_epd.media import FetchedMedia, MediaSource, digest
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.wire import (
    Decline,
    EncodeItem,
    EncodeRequest,
    Grant,
    Layout,
    Offer,
    Payload,
    ReplyTo,
    TensorSpec,
)

NAMESPACE = "Model/float32/0123456789abcdef"
ROWS, WIDTH = 3, 4


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
    """The service's tower, fetcher and sender at once; media are named by their bytes."""

    def __init__(self) -> None:
        self.acquire = Stage()
        self.preprocess = Stage()
        self.offered = Stage()
        self.forwarded = Stage()
        self.delivered = Stage()
        self.answers: dict[int, Decline | EpdError] = {}
        self.offers: list[Offer] = []
        self.payloads: list[tuple[str, Payload, torch.Tensor]] = []
        self.at_once = 0
        self.most_at_once = 0

    # MediaFetcher

    async def fetch(self, source: MediaSource, deadline: float) -> FetchedMedia:
        data = source.data if source.data is not None else (source.url or "").encode()
        await self.acquire(data)
        return FetchedMedia(data, digest(data), source)

    # Tower

    async def prepare(self, modality: str, data: bytes) -> Prepared:
        await self.preprocess(data)
        spec = TensorSpec("float32", (ROWS, WIDTH))
        return Prepared(Layout(modality, spec, [[1, 2, 6]]), modality, [data])

    async def forward(self, prepared: Prepared) -> torch.Tensor:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.forwarded(prepared.model_items[0])
        finally:
            self.at_once -= 1
        return torch.full((ROWS, WIDTH), float(len(prepared.model_items[0])))

    # Sender

    async def offer(self, endpoint: str, message: Offer, timeout_s: float) -> Grant | Decline:
        self.offers.append(message)
        await self.offered(message.item)
        answer = self.answers.get(message.item) or Grant(message.ticket, message.item, 77)
        if isinstance(answer, EpdError):
            raise answer
        return answer

    async def deliver(
        self, endpoint: str, message: Payload, embedding: torch.Tensor, timeout_s: float
    ) -> None:
        await self.delivered(message.item)
        self.payloads.append((endpoint, message, embedding))


@pytest.fixture
async def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def metrics() -> EncoderMetrics:
    return EncoderMetrics()


@pytest.fixture
def service(fakes: Fakes, metrics: EncoderMetrics) -> EncoderService:
    return EncoderService(
        tower=fakes,
        fetcher=fakes,
        sender=fakes,
        metrics=metrics,
        namespace=NAMESPACE,
        name="http://encoder:1",
        max_items=8,
    )


@pytest.fixture
def count(metrics: EncoderMetrics) -> Callable[..., float]:
    """One sample of the metrics; 0 where there is none yet."""

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"sglang:epd_encoder_{name}", labels) or 0.0

    return value


@pytest.fixture
def asking() -> Callable[..., EncodeRequest]:
    def request(
        *media: bytes,
        request_id: str = "r1",
        ttl_s: float = 30.0,
        namespace: str = NAMESPACE,
        **options: Any,
    ) -> EncodeRequest:
        items = [
            EncodeItem(n, "IMAGE", f"image {n + 1} of {len(media)}", data=data, options=options)
            for n, data in enumerate(media)
        ]
        reply_to = ReplyTo("tcp://receiver:1", "the-secret-ticket")
        return EncodeRequest(request_id, namespace, ttl_s, reply_to, items)

    return request
