"""Takes encode requests through their stages: acquire, preprocess, offer, forward, deliver.

Items of a request run side by side and fail alone. The offer is made as soon as the
layout is known, so the grant is usually there when the forward is done, and an item
that is declined before its turn at the tower is never encoded.

Owns admission, cancellation and the outcomes. Does not own HTTP, sockets or the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import torch
from blake3 import blake3

from sglang_epd.encoder.tower import Prepared, Tower
from sglang_epd.errors import (
    DeadlineError,
    DuplicateError,
    EncodeError,
    EpdError,
    MediaTooLargeError,
    NamespaceError,
    OverloadedError,
    ProtocolError,
)
from sglang_epd.media import MediaFetcher, MediaSource
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.transfer.sender import GrantLostError, Offered, Sender
from sglang_epd.wire import (
    Decline,
    EncodeItem,
    EncodeReply,
    EncodeRequest,
    ItemOutcome,
    Offer,
)
from sglang_epd.wire.tensors import spec_bytes

logger = logging.getLogger(__name__)

_RECENT = 256
_RETRY_AFTER_S = 1.0
# Items preprocessed or in the tower at a time, and embeddings that wait for an answer to
# their offer: enough that the tower never waits, few enough that a burst does not hold all
# its pixels in memory.
_PREPARED_AHEAD = 4


class EncoderService:
    """The encoder's work, whoever asks for it.

    Args:
        tower: prepares and encodes items.
        fetcher: reads media.
        sender: the payload channel.
        metrics: counts what happens.
        namespace: this encoder's identity; requests of another are refused.
        name: how this encoder is called in answers (its URL).
        max_items: items in work at a time; more are refused with 503.
    """

    def __init__(
        self,
        *,
        tower: Tower,
        fetcher: MediaFetcher,
        sender: Sender,
        metrics: EncoderMetrics,
        namespace: str,
        name: str,
        max_items: int = 1024,
    ) -> None:
        self._tower = tower
        self._fetcher = fetcher
        self._sender = sender
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._ahead = asyncio.Semaphore(_PREPARED_AHEAD)
        # Embeddings that nobody has granted memory to yet.
        self._kept = 0
        self._live: dict[str, asyncio.Task[EncodeReply]] = {}
        self._items = 0
        # Requests that have come to their end, whatever it was.
        self.finished = 0
        self._max_items = max_items
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.namespace = namespace
        self.name = name

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Encode and deliver a request's items; one outcome an item.

        Cancelling the call cancels the items at their next stage.

        Raises:
            NamespaceError: the asker expects another encoder.
            DuplicateError: the request id is live.
            MediaTooLargeError: more items than may ever be in work at a time.
            OverloadedError: too many items in work now.
        """
        if request.namespace != self.namespace:
            raise NamespaceError(
                f"encoder identity differs: the language server has {request.namespace}, "
                f"this encoder {self.namespace}; both must serve the same checkpoint and dtype"
            )
        if request.request_id in self._live:
            raise DuplicateError(f"request {request.request_id} is being encoded already")
        if len(request.items) > self._max_items:
            raise MediaTooLargeError(
                f"{len(request.items)} items for one encoder, which takes {self._max_items}"
            )
        if self._items + len(request.items) > self._max_items:
            raise OverloadedError(
                f"{self._items} items in work, at most {self._max_items}",
                retry_after_s=_RETRY_AFTER_S,
            )
        task = asyncio.current_task()
        assert task is not None
        self._live[request.request_id] = task
        self._items += len(request.items)
        self._metrics.items_in_work.set(self._items)
        try:
            deadline = time.monotonic() + request.ttl_s
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._encode_item(request, item, deadline))
                    for item in request.items
                ]
            outcomes = [item.result() for item in running]
            return EncodeReply(request.request_id, self.name, outcomes)
        finally:
            del self._live[request.request_id]
            self._items -= len(request.items)
            self.finished += 1
            self._metrics.items_in_work.set(self._items)

    @property
    def idle(self) -> bool:
        """Whether nothing is in work."""
        return not self._live

    def cancel(self, request_id: str) -> bool:
        """Cancel a live request; False if there is none of that id."""
        task = self._live.get(request_id)
        if task is not None:
            task.cancel()
        return task is not None

    def status(self) -> dict[str, Any]:
        """The encoder's state for people and dispatchers."""
        return {
            "encoder": self.name,
            "namespace": self.namespace,
            "requests": len(self._live),
            "items": self._items,
            "max_items": self._max_items,
            "recent": list(self._recent),
        }

    async def _encode_item(
        self, request: EncodeRequest, item: EncodeItem, deadline: float
    ) -> ItemOutcome:
        ms: dict[str, float] = {}
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                outcome = await self._run_stages(request, item, deadline, ms)
        except asyncio.CancelledError:
            self._metrics.items.labels(item.modality, "cancelled").inc()
            raise
        except TimeoutError:
            outcome = _failed(item, DeadlineError("the request's deadline passed"), ms)
        except EpdError as error:
            outcome = _failed(item, error, ms)
        except Exception:
            logger.exception("%s of %s", item.label, request.request_id)
            outcome = _failed(item, EncodeError("the encoder failed on this item"), ms)
        self._note(request, item, outcome)
        return outcome

    async def _run_stages(
        self, request: EncodeRequest, item: EncodeItem, deadline: float, ms: dict[str, float]
    ) -> ItemOutcome:
        reply_to = request.reply_to
        with self._stage("acquire", ms):
            source = MediaSource(data=item.data, url=item.url)
            media = await self._fetcher.fetch(source, deadline)
        key = _key(self.namespace, media.digest, item)
        embedding: torch.Tensor | None = None
        renewal = False
        # Again when a grant was lost on the way: the receiver had given us up.
        while True:
            async with AsyncExitStack() as offering:
                async with self._entered("wait", self._ahead, ms):
                    if embedding is None:
                        prepared = await self._prepare(item, media.data, ms)
                        layout = prepared.layout
                    offer = Offer(
                        reply_to.ticket,
                        item.item,
                        key,
                        layout,
                        spec_bytes(layout.embedding),
                        renewal=renewal,
                    )
                    offered = await offering.enter_async_context(
                        self._sender.offer(reply_to.endpoint, offer)
                    )
                    if embedding is None:
                        embedding = await self._forward(prepared, offered, ms)
                        del prepared
                keeps = embedding is not None and offered.granted is None
                if keeps and self._kept >= _PREPARED_AHEAD:
                    # The receiver is slow to answer: made again once it has granted.
                    embedding, keeps = None, False
                self._kept += keeps
                try:
                    with self._stage("grant", ms):
                        decision = await offered.decided
                finally:
                    self._kept -= keeps
                if isinstance(decision, Decline):
                    return ItemOutcome(
                        item.item, "declined", decision.reason, ms=ms, layout=layout, key=key
                    )
                if embedding is None:
                    # It waited for memory there, and held none here meanwhile.
                    async with self._entered("wait", self._ahead, ms):
                        prepared = await self._prepare(item, media.data, ms)
                        embedding = await self._forward(prepared, None, ms)
                        del prepared
                assert embedding is not None
                try:
                    with self._stage("deliver", ms):
                        landing = await self._sender.deliver(
                            reply_to.endpoint, decision, embedding, deadline - time.monotonic()
                        )
                except GrantLostError:
                    logger.info("Offering %s of %s again", item.label, request.request_id)
                    renewal = True
                    continue
            self._metrics.bytes_delivered.labels(landing).inc(offer.nbytes)
            return ItemOutcome(
                item.item, "delivered", tokens=layout.tokens, ms=ms, layout=layout, key=key
            )

    async def _prepare(self, item: EncodeItem, data: bytes, ms: dict[str, float]) -> Prepared:
        with self._stage("preprocess", ms):
            return await self._tower.prepare(item.modality, data)

    async def _forward(
        self, prepared: Prepared, offered: Offered | None, ms: dict[str, float]
    ) -> torch.Tensor | None:
        """Run the tower, unless the receiver said meanwhile that it is no use now."""
        async with self._entered("queue", self._turn, ms):
            if offered is not None and offered.answered.done() and offered.granted is None:
                return None
            with self._stage("forward", ms):
                (embedding,) = await self._tower.forward([prepared])
                return embedding

    @asynccontextmanager
    async def _entered(
        self, name: str, gate: asyncio.Lock | asyncio.Semaphore, ms: dict[str, float]
    ) -> AsyncIterator[None]:
        """Hold `gate`; the time it took to get in counts as stage `name`."""
        with self._stage(name, ms):
            await gate.acquire()
        try:
            yield
        finally:
            gate.release()

    @contextmanager
    def _stage(self, name: str, ms: dict[str, float]) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started
            ms[name] = round(ms.get(name, 0.0) + elapsed_s * 1e3, 3)
            self._metrics.stage_seconds.labels(name).observe(elapsed_s)

    def _note(self, request: EncodeRequest, item: EncodeItem, outcome: ItemOutcome) -> None:
        self._metrics.items.labels(item.modality, outcome.state).inc()
        if outcome.state == "failed":
            self._metrics.failures.labels(outcome.code).inc()
        self._recent.append(
            {
                "request_id": request.request_id,
                "index": item.item,
                "modality": item.modality,
                "encoder": self.name,
                "state": outcome.state,
                "code": outcome.code,
                "tokens": outcome.tokens,
                "ms": outcome.ms,
            }
        )


def _key(namespace: str, digest: bytes, item: EncodeItem) -> bytes:
    """EmbeddingKey: everything that the embedding depends on."""
    hasher = blake3(namespace.encode())
    hasher.update(digest)
    try:
        options = json.dumps([item.modality, item.options], sort_keys=True)
    except (TypeError, ValueError):
        raise ProtocolError("the item's options are not plain data") from None
    hasher.update(options.encode())
    return hasher.digest()


def _failed(item: EncodeItem, error: EpdError, ms: dict[str, float]) -> ItemOutcome:
    return ItemOutcome(item.item, "failed", error.code, error.message, ms=ms)
