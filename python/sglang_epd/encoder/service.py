"""Takes encode requests through: acquire, have encoded, offer, deliver.

Items of a request run side by side. One that another encoder may do better at fails alone; one
that is hopeless ends the request. `computations` owns the way from an item's bytes
to its embedding, and the sharing of it. The offer is made as soon as
the layout is known, so the grant is usually there when the embedding is; an item that is
declined before its turn is never encoded.

Owns admission, cancellation and the outcomes. Does not own HTTP, sockets or the model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang_epd import logs
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.breakage import drop_frames
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.work import Hold, MediaNeededError
from sglang_epd.encoder.urls import Content, UrlReader
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    NamespaceError,
    from_code,
)
from sglang_epd.media import Age, Arrival, Intake, MediaSource, check_content_hash
from sglang_epd.namespace import embedding_key
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.transfer.delivery import Delivery, Granted, GrantLostError, Offered
from sglang_epd.wire.http import EncodeItem, EncodeReply, EncodeRequest, ItemOutcome
from sglang_epd.wire.messages import Decline, Offer
from sglang_epd.wire.tensors import spec_bytes

logger = logging.getLogger(__name__)

_RECENT = 256
# A receiver answers an offer in milliseconds, if only that it has to wait.
_ANSWER_S = 1.0
_RETRY_AFTER_S = (1.0, 30.0)


class Room:
    """The bytes that came inline with one request, from their first to its end.

    Args:
        age: of the request; one that came earlier has a smaller one.
    """

    def __init__(self, service: EncoderService, age: int) -> None:
        self._service = service
        self._nbytes = 0
        self.age = age

    def take(self, nbytes: int) -> None:
        """Count bytes of the request before they are read.

        Raises:
            OverloadedError: too many are in work.
        """
        self._service.admission.take_bytes(nbytes, self._nbytes)
        self._nbytes += nbytes

    def close(self) -> None:
        self._service.admission.nbytes -= self._nbytes
        self._service.intake.serve()
        self._nbytes = 0


@dataclass(eq=False)
class _Asked:
    """An item on its way through the stages.

    Attributes:
        deadline: in seconds of `time.monotonic()`.
        ms: milliseconds in each stage.
        began_at: in seconds since 1970, as in SGLang's servers.
    """

    request: EncodeRequest
    item: EncodeItem
    deadline: float
    age: Age
    # Of the request; then its own.
    span: Span
    delivery: Delivery
    ms: dict[str, float] = field(default_factory=dict)
    began_at: float = field(default_factory=time.time)

    def failed(self, error: EpdError) -> ItemOutcome:
        return ItemOutcome(self.item.item, "failed", error.code, error.message, ms=self.ms)


class EncoderService:
    """The encoder's work, for any transport of requests.

    Args:
        namespace: this encoder's identity; requests of another are refused.
        name: how this encoder is called in answers (its URL).
        urls: reads media.

    Attributes:
        finished: requests that have ended, in any way.
    """

    def __init__(
        self,
        *,
        computations: Computations,
        urls: UrlReader,
        sender: Delivery,
        admission: Admission,
        metrics: EncoderMetrics,
        namespace: str,
        name: str,
    ) -> None:
        self.computations = computations
        self.urls = urls
        self._sender = sender
        self.admission = admission
        self._metrics = metrics
        self._live: Counter[asyncio.Task[Any]] = Counter()
        self.intake = Intake(admission)
        self._ages = itertools.count()
        self.finished = 0
        self._started = time.monotonic()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.namespace = namespace
        self.name = name

    @property
    def retry_after_s(self) -> float:
        """When a refused asker may come again."""
        least, most = _RETRY_AFTER_S
        return min(max(self.computations.expected_wait_s(), least), most)

    @contextmanager
    def receiving(self) -> Iterator[Room]:
        """Around all of a request, from before its body is read; counts its bytes.

        Raises:
            UnavailableError: the encoder is being shut down.
            OverloadedError: there is no room for anything.
        """
        self.admission.check()
        room = Room(self, next(self._ages))
        try:
            yield room
        finally:
            room.close()

    async def encode(
        self,
        request: EncodeRequest,
        room: Room,
        span: Span = OFF,
        delivery: Delivery | None = None,
    ) -> EncodeReply:
        """Encode and deliver a request's items; one outcome an item.

        An item that no encoder could make ends the others, which have no outcome then: the
        asker's request has failed. Cancelling the call cancels the items at their next stage.

        Args:
            span: of the request; has each item as a part.
            delivery: in place of the service's sender.

        Raises:
            NamespaceError: the asker expects another encoder.
            UnavailableError: the encoder is being shut down.
            DuplicateError: the request id is live.
            MediaTooLargeError: more items than may ever be in work at a time.
            OverloadedError: too many items in work now.
        """
        span.note(encoder=self.name, request_id=request.request_id, items=len(request.items))
        if request.namespace != self.namespace:
            raise NamespaceError.between(request.namespace, self.namespace)
        with self._admitted(request) as outcomes:
            deadline = time.monotonic() + request.ttl_s
            running: list[asyncio.Task[ItemOutcome]] = []

            def end_all_after_a_hopeless_one(item: asyncio.Task[ItemOutcome]) -> None:
                if not item.cancelled() and not item.exception() and _is_hopeless(item.result()):
                    for other in running:
                        other.cancel()

            async with asyncio.TaskGroup() as group:
                for item in request.items:
                    age = room.age, item.item
                    asked = _Asked(request, item, deadline, age, span, delivery or self._sender)
                    encoding = self._encode_item(asked)
                    running.append(group.create_task(encoding))
                    running[-1].add_done_callback(end_all_after_a_hopeless_one)
            outcomes += [item.result() for item in running if not item.cancelled()]
            return EncodeReply(request.request_id, self.name, outcomes)

    @contextmanager
    def _admitted(self, request: EncodeRequest) -> Iterator[list[ItemOutcome]]:
        """While a request's items are in work; takes their outcomes."""
        urls = sum(item.data is None for item in request.items)
        self.admission.admit(request.request_id, len(request.items), urls)
        outcomes: list[ItemOutcome] = []
        ended = self._metrics.beside.request(request.items)
        try:
            with self.at_work():
                yield outcomes
        finally:
            self.admission.leave(request.request_id)
            self.finished += 1
            ended(outcomes)

    @property
    def healthy(self) -> bool:
        """Whether it takes new work and has a tower for it."""
        return not self.admission.draining and self.computations.able

    def drain(self) -> None:
        """Take nothing new from now on."""
        self.admission.draining = True

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the current task does what `wait_idle` waits for."""
        task = asyncio.current_task()
        assert task is not None
        self._live[task] += 1
        try:
            yield
        finally:
            self._live -= Counter((task,))

    async def wait_idle(self) -> None:
        """Return when nothing is in work."""
        while self._live:
            await asyncio.wait(self._live)

    def status(self) -> dict[str, Any]:
        """The encoder's state for people and dispatchers; names no request."""
        admission = self.admission
        return {
            "encoder": self.name,
            "namespace": self.namespace,
            "state": "draining" if admission.draining else "ready",
            "uptime_s": round(time.monotonic() - self._started, 1),
            "requests": admission.live,
            "finished": self.finished,
            "items": admission.items,
            "waiting": admission.waiting,
            "max_items": admission.max_items,
            "bytes": admission.nbytes,
            "max_bytes": admission.max_bytes,
            "urls": len(self.urls.memory),
            **self.computations.status(),
        }

    def recent(self) -> list[dict[str, Any]]:
        """The last items: their requests, outcomes and timings."""
        return list(self._recent)

    async def _encode_item(self, asked: _Asked) -> ItemOutcome:
        request, item = asked.request, asked.item
        with (
            logs.about(request.asker or request.request_id, item.item),
            asked.span.child("epd_item") as span,
        ):
            if span:
                _describe(span, self.name, item)
            asked.span = span
            try:
                async with asyncio.timeout(asked.deadline - time.monotonic()):
                    outcome = await self._run_stages(asked)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    self._metrics.items.labels(item.modality, "cancelled").inc()
                    raise
                # The item was not cancelled: something that it waited for was.
                logger.error("%s of %s was cut off", item.label, request.request_id)
                outcome = asked.failed(EncodeError("the encoder failed on this item"))
            except TimeoutError:
                outcome = asked.failed(DeadlineError("the request's deadline passed"))
            except EpdError as error:
                outcome = asked.failed(error)
                drop_frames(error)  # they have the media
            except Exception:
                logger.exception("%s of %s", item.label, request.request_id)
                outcome = asked.failed(EncodeError("the encoder failed on this item"))
            finally:
                self.admission.note_ended(request.request_id)
            self._note(asked, outcome)
            if span:
                _say_outcome(span, outcome)
            return outcome

    async def _run_stages(self, asked: _Asked) -> ItemOutcome:
        request, item = asked.request, asked.item

        def key_of(digest: bytes) -> bytes:
            return embedding_key(self.namespace, digest, item.modality, item.options)

        def at_hand(digest: bytes) -> bool:
            return self.computations.at_hand(key_of(digest), looked=looked)

        looked = False
        fetching = item.data is None
        # Again when the store does not have the embedding of a known URL, or when one that
        # was at hand went while its receiver had no memory.
        while True:
            with self.intake.arrival(asked.age) as arrival:
                try:
                    with self._stage("acquire", asked):
                        content = await self._acquire(asked, arrival, at_hand)
                finally:
                    if fetching:
                        self.admission.note_fetched(request.request_id)
                        fetching = False
                hold = self.computations.hold(
                    key_of(content.digest),
                    item.modality,
                    content.data,
                    request.request_id,
                    asked.deadline,
                    place=item.item,
                    looked=looked,
                    options=item.options,
                )
                del content
                try:
                    return await self._deliver(asked, hold)
                except MediaNeededError as needed:
                    looked = True
                    logger.info("Reading %s of %s: %s", item.label, request.request_id, needed)
                finally:
                    hold.release()
                    asked.ms |= hold.ms
                    if asked.span:
                        _show_stages(asked.span, hold)

    async def _acquire(
        self, asked: _Asked, arrival: Arrival, at_hand: Callable[[bytes], bool]
    ) -> Content:
        item = asked.item
        source = MediaSource(data=item.data, url=item.url)
        try:
            # Media that are to be compared with a hash have to be here.
            enough = (lambda _digest: False) if item.content_hash else at_hand
            content = await self.urls.read(source, asked.deadline, enough, arrival)
            if item.content_hash and content.data is not None:
                await asyncio.to_thread(check_content_hash, content.data, item.content_hash)
        except EpdError as error:
            reason = getattr(error, "reason", "") or error.code
            self._metrics.fetch_failures.labels(reason).inc()
            raise
        here = content.data if item.data is None else None  # inline media are counted
        arrival.settle(len(here or b""))
        return content

    async def _deliver(self, asked: _Asked, hold: Hold) -> ItemOutcome:
        item = asked.item
        layout = await hold.layout()
        self._metrics.beside.found(item.modality, layout.tokens, hold.source)
        endpoint, ticket = asked.request.reply_to.endpoint, asked.request.reply_to.ticket
        nbytes = spec_bytes(layout.embedding)

        def ended(state: str, code: str = "", tokens: int = 0) -> ItemOutcome:
            return ItemOutcome(
                item.item,
                state,
                code,
                tokens=tokens,
                ms=asked.ms,
                layout=layout,
                key=hold.key,
                source=hold.source,
            )

        renewal = False
        # Again when a grant was lost on the way: the receiver had given us up.
        while True:
            offer = Offer(ticket, item.item, hold.key, layout, nbytes, renewal=renewal)
            async with asked.delivery.offer(endpoint, offer) as offered:
                decision = await self._decision(asked, hold, offered)
                if isinstance(decision, Decline):
                    return ended("declined", decision.reason)
                hold.want(True)
                try:
                    await self._begin(asked, hold, decision)
                    embedding = await hold.embedding()
                    with self._stage("deliver", asked) as part:
                        landing = await asked.delivery.deliver(
                            endpoint, decision, embedding, asked.deadline - time.monotonic()
                        )
                        part.note(landing=landing, bytes=nbytes)
                except GrantLostError:
                    logger.info("Offering %s of %s again", item.label, asked.request.request_id)
                    renewal = True
                    continue
            self._metrics.delivered_bytes.labels(landing).inc(nbytes)
            self._metrics.beside.delivered(asked.ms["deliver"] / 1e3)
            return ended("delivered", tokens=layout.tokens)

    async def _begin(self, asked: _Asked, hold: Hold, granted: Granted) -> None:
        """Deliver what there is of an embedding that is being made, until it is made."""
        known = 0
        while (partly := await hold.beginning(known)) is not None:
            embedding, known = partly
            endpoint, left_s = asked.request.reply_to.endpoint, asked.deadline - time.monotonic()
            await asked.delivery.begin(endpoint, granted, embedding, known, left_s)

    async def _decision(self, asked: _Asked, hold: Hold, offered: Offered) -> Granted | Decline:
        """Wait for the grant, with the embedding in the making as long as it may be of use."""
        at_hand = hold.made.done()
        signs: list[asyncio.Future[Any]] = [hold.made, offered.answered]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        if hold.made.done():
            hold.made.result()
        if at_hand:
            await asyncio.wait([offered.answered], timeout=_ANSWER_S)
        if offered.granted is None:
            # The receiver is slow to answer, or has no memory now.
            hold.want(False)
        with self._stage("grant", asked):
            await asyncio.wait([offered.answered], timeout=_ANSWER_S)
            if offered.answered.done() and not offered.answered.result():
                return await offered.decided
            # It has no memory now, or does not answer at all.
            with self.admission.awaiting_memory(asked.request.request_id):
                return await offered.decided

    @contextmanager
    def _stage(self, name: str, asked: _Asked) -> Iterator[Span]:
        started = time.perf_counter()
        try:
            with asked.span.child(f"epd_{name}") as part:
                yield part
        finally:
            elapsed_s = time.perf_counter() - started
            asked.ms[name] = round(asked.ms.get(name, 0.0) + elapsed_s * 1e3, 3)
            self._metrics.stage_seconds.labels(name).observe(elapsed_s)

    def _note(self, asked: _Asked, outcome: ItemOutcome) -> None:
        item = asked.item
        self._metrics.items.labels(item.modality, outcome.state).inc()
        if outcome.state == "failed":
            self._metrics.failures.labels(outcome.code).inc()
        self._recent.append(
            {
                "request_id": asked.request.request_id,
                "index": item.item,
                "modality": item.modality,
                "encoder": self.name,
                "state": outcome.state,
                "code": outcome.code,
                "source": outcome.source,
                "tokens": outcome.tokens,
                "ms": outcome.ms,
                "began_at": asked.began_at,
                "ended_at": time.time(),
            }
        )


def _is_hopeless(outcome: ItemOutcome) -> bool:
    """Whether no other encoder would do better."""
    failed = outcome.state == "failed"
    return failed and not from_code(outcome.code, outcome.message).retry_elsewhere


def _describe(span: Span, encoder: str, item: EncodeItem) -> None:
    source = "url" if item.data is None else "inline"
    span.note(encoder=encoder, item=item.item, modality=item.modality, media=source)
    if item.data is not None:
        span.note(media_bytes=len(item.data))


def _say_outcome(span: Span, outcome: ItemOutcome) -> None:
    layout = outcome.layout
    if layout is not None:
        patches = sum(math.prod(extents) for extents in layout.grid)
        span.note(patches=patches, tokens=layout.tokens, bytes=spec_bytes(layout.embedding))
    span.note(outcome=outcome.state, source=outcome.source or None)
    if outcome.state == "failed":
        span.fail(outcome.code, outcome.message)
    elif outcome.code:
        span.note(reason=outcome.code)


def _show_stages(span: Span, hold: Hold) -> None:
    """The stages that others may share; an asker that joined later sees them from then on."""
    for name, began, ended in hold.stages:
        if ended > hold.began:
            part = span.child(f"epd_{name}", began=max(began, hold.began), source=hold.source)
            part.end(ended)
