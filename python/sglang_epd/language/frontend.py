"""The tokenizer process: plans a request, announces it, and has it encoded.

One background task a request. It asks encoders for items that are not on this server:
an item whose layout is known may be, and the receiver says which of those are needed. It
ends when the receiver needs nothing more or the request has failed; the scheduler learns
of the latter over the control channel. It is cancelled when the client goes away. The
layouts that encoders send are kept, and sent to the decode server where there is one
(`layouts`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

import msgspec

from sglang_epd import logs
from sglang_epd.cache import LayoutCache
from sglang_epd.dispatch.dispatcher import Dispatcher
from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    EpdError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.language.layouts import Slot
from sglang_epd.spans import OFF, Span
from sglang_epd.tally import Tally
from sglang_epd.transfer.control import Control
from sglang_epd.wire.http import EncodeItem, ItemLayout, ReplyTo
from sglang_epd.wire.messages import MAX_HEADER_BYTES, Expect, Needed, encode_message

logger = logging.getLogger(__name__)

# The receiver sits in the same host's scheduler, which is up before any request.
_RECEIVER_TIMEOUT_S = 20.0
# The sources of an embedding that encoders may name, as users see them; any other name
# they may say is "computed": it is a label of metrics.
_SOURCES = {"cached": "encoder_cache", "stored": "store", "coalesced": "coalesced"}
# Of so many requests it is known where their items came from.
_MAX_ACCOUNTS = 4096
# Dispatch ends at the deadline by itself, and names the missing items.
_GRACE_S = 2.0
# Without the receiver's answer by then, all items are sent.
_WORD_TIMEOUT_S = 1.0
# The same where a scheduler is asked first, which may be in a forward pass.
_SCHEDULER_TIMEOUT_S = 5.0


class _AbortedError(Exception):
    """The scheduler has ended a request before its items had come."""


@dataclass(eq=False)
class _Request:
    """One request on its way.

    Attributes:
        layouts: of the items, as far as they are known.
        span: of all that is done here for its media.
        unheard: whether the receiver's answer is missing yet.
        over: whether it needs nothing any more.
        task: what serves it.
        underway: has its error, or None when all was delivered, or as much as is waited for.
    """

    rid: str
    items: list[EncodeItem]
    keys: list[bytes]
    layouts: dict[int, ItemLayout]
    expect: Expect
    slot: Slot | None
    deadline: float
    span: Span = OFF
    unheard: bool = False
    over: bool = False
    sent: int = 0
    # Where encoders had items from, by number.
    sources: dict[int, str] = field(default_factory=dict)
    tasks: set[asyncio.Task[dict[int, ItemLayout]]] = field(default_factory=set)
    task: asyncio.Task[EpdError | None] = field(init=False)
    underway: asyncio.Future[EpdError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Frontend:
    """Dispatches requests' items.

    Args:
        dispatcher: how items reach encoders.
        control: the channel to this server's receiver.
        request_timeout_s: one deadline for all of a request's items.
        key: the key of an item; empty where it has none yet.
        ask_prefix: whether schedulers look into the prefix cache before anything is sent.
        first_item: whether a request is under way when its first item has landed, rather than
            all of them.
        tally: counts where items come from.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        control: Control,
        request_timeout_s: float,
        key: Callable[[EncodeItem], bytes] = lambda _item: b"",
        *,
        ask_prefix: bool = False,
        first_item: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._control = control
        self._timeout_s = request_timeout_s
        self._key = key
        # Layouts that encoders have sent.
        self._known = LayoutCache()
        self._ask_prefix = ask_prefix
        self._first_item = first_item
        self._tally = tally or Tally()
        self._accounts: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._live: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def start(
        self,
        rid: str,
        items: list[EncodeItem],
        slot: Slot | None = None,
        *,
        known: dict[int, ItemLayout] | None = None,
        parent: Span = OFF,
    ) -> Expect:
        """Begin to have `items` encoded; returns the announcement that the scheduler waits under.

        Must be called in the event loop. Never blocks.

        Args:
            rid: the request's id, under which it may be cancelled.
            slot: where a decode server learns the layouts, or that there will be none.
            known: keys and layouts of items, by number, from an earlier request for them; gets
                those that encoders tell.
            parent: the span of the request.
        """
        self._accounts.pop(rid, None)  # of an earlier request
        layouts = {} if known is None else known
        keys = [
            self._key(item) or (layouts[item.item].key if item.item in layouts else b"")
            for item in items
        ]
        layouts |= self._recall(items, keys)
        span = parent.child("epd_media", items=len(items), known=len(layouts))
        for modality, count in Counter(item.modality for item in items).items():
            self._tally.observe("request_items", count, modality)
        expect = self._announcement(items, keys, layouts, span)
        deadline = time.monotonic() + self._timeout_s
        self._begin(_Request(rid, items, keys, layouts, expect, slot, deadline, span))
        return expect

    def again(self, rid: str, items: list[EncodeItem], expect: Expect, parent: Span = OFF) -> None:
        """Have items encoded that were thought not to be needed, under a new announcement.

        Must be called in the event loop.

        Args:
            items: of the request, all of them.
            expect: the new announcement, which a scheduler has made.
            parent: span of the request.

        Raises:
            ProtocolError: it is not of these items.
        """
        keys = [self._key(item) for item in items]
        # An item that has to be fetched has a key that an encoder sent.
        told = zip(keys, expect.keys, strict=False)
        if len(keys) != expect.items or any(key not in (b"", known) for key, known in told):
            raise ProtocolError("the request's media are not those that it was announced with")
        layouts = self._recall(items, keys)
        deadline = time.monotonic() + expect.ttl_s
        span = parent.child("epd_media", items=len(items), again=True)
        self._begin(_Request(rid, items, keys, layouts, expect, None, deadline, span))

    def _announcement(
        self,
        items: Sequence[EncodeItem],
        keys: Sequence[bytes],
        layouts: dict[int, ItemLayout],
        span: Span,
    ) -> Expect:
        expect = Expect(
            secrets.token_urlsafe(16),
            len(items),
            self._timeout_s,
            announcer=self._control.name,
            trace=span.headers.get("traceparent", ""),
            waits=self._first_item,
        )
        if not layouts:
            return expect
        # Without a layout an embedding is not here either: such items are sent at once.
        known = tuple(
            key if item.item in layouts else b"" for item, key in zip(items, keys, strict=True)
        )
        expect = msgspec.structs.replace(expect, keys=known)
        if not self._ask_prefix or len(layouts) < len(items):
            return expect
        told = tuple(layouts[item.item].layout for item in items)
        full = msgspec.structs.replace(expect, layouts=told)
        return full if len(encode_message(full)) <= MAX_HEADER_BYTES else expect

    def _begin(self, request: _Request) -> None:
        loop, name = asyncio.get_running_loop(), f"encode {request.rid}"
        # A connection keeps the context that it is opened in: not that of the caller, which has
        # the request's media.
        request.task = loop.create_task(self._run(request), name=name, context=Context())
        # Not in `_run`, of which not a line runs if it is cancelled before it begins.
        request.task.add_done_callback(lambda _task: self._end(request))
        self._live[request.rid] = request

    def account(self, rid: str) -> dict[str, int] | None:
        """How many of a request's items came from where, as `DispatchMetrics.items` names it;
        None until all have come, and when it is forgotten."""
        return self._accounts.get(rid)

    def underway(self, rid: str) -> asyncio.Future[EpdError | None] | None:
        """Has None when a live request's items are delivered, or with `first_item` one of them,
        and its error if it ends before."""
        live = self._live.get(rid)
        return None if live is None else live.underway

    def encoded_here(self, rid: str, items: int) -> None:
        """So many items of a request went to no encoder: this server's tower has them."""
        self._accounts.pop(rid, None)  # of an earlier request
        self._tally.add("items", "local", amount=items)

    def cancel(self, rid: str) -> None:
        """The request is over, perhaps before its items arrived."""
        if rid in self._live:
            self._live[rid].task.cancel()

    def _end(self, request: _Request) -> None:
        if self._live.get(request.rid) is request:
            del self._live[request.rid]
        error: EpdError | None = RequestCancelledError("the request was cancelled")
        if not request.task.cancelled():
            surprise = request.task.exception()
            if surprise is not None:
                logger.error("Could not end %s", request.rid, exc_info=surprise)
            error = EncodeError("its end is unknown") if surprise else request.task.result()
        if error is not None:
            self._tally.add("failures", error.code)
            request.span.fail(error.code, error.message)
            if request.slot is not None:
                request.slot.failed(error)
        request.span.end()
        if not request.underway.done():
            request.underway.set_result(error)

    def cancel_all(self, which: Callable[[str], bool] = lambda _rid: True) -> None:
        """Every request is over of whose id `which` says so."""
        for rid, live in self._live.items():
            if which(rid):
                live.task.cancel()

    def _recall(self, items: Sequence[EncodeItem], keys: Sequence[bytes]) -> dict[int, ItemLayout]:
        found = {}
        for item, key in zip(items, keys, strict=True):
            layout = self._known.find(key) if key else None
            if layout is not None:
                found[item.item] = ItemLayout(key, layout)
        return found

    async def _run(self, request: _Request) -> EpdError | None:
        with logs.about(request.rid):
            return await self._deliver(request)

    async def _deliver(self, request: _Request) -> EpdError | None:
        expect = request.expect
        try:
            with self._control.watched(expect.ticket) as news:
                endpoint = await self._control.endpoint(min(_RECEIVER_TIMEOUT_S, expect.ttl_s))
                await self._control.expect(expect)
                await self._serve(request, ReplyTo(endpoint, expect.ticket), news)
        except (asyncio.CancelledError, _AbortedError):
            logger.info("Cancelled %d items of %s", len(request.items), request.rid)
            if request.tasks:
                # An item may have come with another layout, which is why the request has ended:
                # the next one is told it.
                for key in expect.keys:
                    self._known.drop(key)
            await self._control.cancel(expect.ticket)
            return RequestCancelledError("the request was cancelled")
        except Exception as error:
            if isinstance(error, EpdError):
                # Its trace holds frames that hold it, and the media.
                failure = error.with_traceback(None)
                logger.warning("Could not encode %s: %s (%s)", request.rid, failure, failure.code)
            else:
                logger.exception("Could not encode %s", request.rid)
                failure = EncodeError("the request's media could not be dispatched")
            await self._control.fail(expect.ticket, failure)
            return failure
        finally:
            for task in request.tasks:
                task.cancel()
            await asyncio.gather(*request.tasks, return_exceptions=True)
        return None

    async def _serve(
        self, request: _Request, reply_to: ReplyTo, news: asyncio.Queue[Needed]
    ) -> None:
        """Send items as they become needed, until the receiver can need no more."""
        started = time.monotonic()
        keys = request.expect.keys or (b"",) * len(request.items)
        self._send(request, reply_to, [number for number, key in enumerate(keys) if not key])
        request.unheard = any(keys)
        word_by = started + (_SCHEDULER_TIMEOUT_S if request.expect.layouts else _WORD_TIMEOUT_S)
        delivered = False
        unasked: set[int] = set()
        last = Needed(request.expect.ticket)
        word = asyncio.create_task(news.get())
        try:
            while not request.over or request.tasks:
                if not delivered and not request.tasks and not request.unheard:
                    delivered = True
                    self._delivered(request, started)
                now = time.monotonic()
                limit = word_by if request.unheard else request.deadline + _GRACE_S
                waiting = {word, *request.tasks} if not request.over else request.tasks
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=max(0.0, limit - now),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in [task for task in request.tasks if task.done()]:
                    request.tasks.discard(task)
                    self._learn(request, task.result())
                if word in done:
                    message = word.result()
                    word = asyncio.create_task(news.get())
                    if message.begun:
                        _go_on(request)
                        continue
                    if message.aborted:
                        raise _AbortedError
                    request.unheard, request.over = False, message.over
                    last = message
                    # Not those again that went without word, and are on their way.
                    items = [
                        one for one in message.items if one not in unasked or not request.tasks
                    ]
                    unasked.clear()
                    self._send(request, reply_to, items)
                elif not done and request.unheard:
                    logger.warning("The receiver does not say what %s needs", request.rid)
                    request.unheard = False
                    unasked = {number for number, key in enumerate(keys) if key}
                    self._send(request, reply_to, sorted(unasked))
                elif not done and not delivered:
                    raise DeadlineError("the request's media were not delivered in time")
                elif not done:
                    return  # no claim came; the receiver ends the request
            if not delivered:
                self._delivered(request, started)
            self._account(request, last)
        finally:
            word.cancel()

    def _send(self, request: _Request, reply_to: ReplyTo, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        every = len(numbers) == len(request.items)
        items = request.items if every else [request.items[number] for number in numbers]
        request.sent += len(items)
        run = self._dispatcher.run(
            reply_to,
            items,
            request.deadline,
            request.sources.__setitem__,
            span=request.span,
            asker=request.rid,
        )
        request.tasks.add(asyncio.create_task(run, name=f"dispatch {request.rid}"))

    def _learn(self, request: _Request, layouts: dict[int, ItemLayout]) -> None:
        for number, told in layouts.items():
            if request.keys[number] not in (b"", told.key):
                logger.warning("%s: an encoder tells another key", request.items[number].label)
                continue
            self._known.add(told.key, told.layout)
        request.layouts |= layouts

    def _delivered(self, request: _Request, started: float) -> None:
        """All of a request's items are at the receiver."""
        request.span.event("delivered")
        if request.slot is not None:
            layouts = [request.layouts.get(item.item) for item in request.items]
            request.slot.learnt(layouts)
        elapsed_ms = (time.monotonic() - started) * 1e3
        self._tally.observe("media_seconds", elapsed_ms / 1e3)
        total = len(request.items)
        logger.info(
            "Delivered %d items of %s in %.1f ms, %d by encoders",
            *(total, request.rid, elapsed_ms, request.sent),
        )
        _go_on(request)

    def _account(self, request: _Request, last: Needed) -> None:
        """Note where the items of a request came from, now that all have."""
        counts = Counter(_SOURCES.get(source, "computed") for source in request.sources.values())
        # An item that was delivered may turn out to be covered after all.
        rest = len(request.items) - len(request.sources) - last.cached
        counts += Counter({"kv": min(last.covered, rest), "language_cache": last.cached})
        for source, items in counts.items():
            self._tally.add("items", source, amount=items)
        if request.span:
            request.span.note(**{f"media_sources.{name}": items for name, items in counts.items()})
        self._accounts[request.rid] = dict(counts)
        while len(self._accounts) > _MAX_ACCOUNTS:
            self._accounts.popitem(last=False)


def _go_on(request: _Request) -> None:
    if not request.underway.done():  # as it is when its listener was cancelled
        request.underway.set_result(None)
