"""The tokenizer process: plans a request, announces it, and has it encoded.

One background task a request. It ends when every item was delivered or the request
failed; the scheduler learns of the latter over the control channel. It is cancelled
when the client goes away. What the encoders say of the items' layouts is kept for the
decode server, where there is one (`layouts`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sglang_epd.dispatch.dispatcher import Dispatcher
from sglang_epd.errors import EncodeError, EpdError, RequestCancelledError
from sglang_epd.language.layouts import Slot
from sglang_epd.transfer.control import Control
from sglang_epd.wire import EncodeItem, Expect, ReplyTo

logger = logging.getLogger(__name__)

# The receiver sits in the same host's scheduler, which is up before any request.
_RECEIVER_TIMEOUT_S = 20.0


@dataclass
class _Live:
    ticket: str
    task: asyncio.Task[EpdError | None]


class Frontend:
    """Dispatches requests' items.

    Args:
        dispatcher: how items reach encoders.
        control: the channel to this server's receiver.
        request_timeout_s: one deadline for all of a request's items.
    """

    def __init__(self, dispatcher: Dispatcher, control: Control, request_timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._control = control
        self._timeout_s = request_timeout_s
        self._live: dict[str, _Live] = {}
        # Called with a request's id and what it failed with, None where all was delivered;
        # once for each request that was started.
        self.on_end: Callable[[str, EpdError | None], None] = lambda _rid, _error: None

    def __len__(self) -> int:
        return len(self._live)

    def start(
        self,
        rid: str,
        items: list[EncodeItem],
        consumers: int,
        slot: Slot | None = None,
        among: Collection[str] | None = None,
    ) -> Expect:
        """Begin to have `items` encoded; returns what the scheduler is to wait for.

        Must be called in the event loop. Never blocks.

        Args:
            rid: the request's id, under which it may be cancelled.
            consumers: how many scheduler requests will wait for these items.
            slot: where a decode server learns the layouts, or that there will be none.
            among: encoders that may be asked; None for all.
        """
        expect = Expect(secrets.token_urlsafe(16), len(items), consumers, self._timeout_s)
        task = asyncio.get_running_loop().create_task(
            self._run(rid, items, expect, slot, among), name=f"encode {rid}"
        )
        self._live[rid] = _Live(expect.ticket, task)
        # Not in `_run`, of which not a line runs if it is cancelled before it begins.
        task.add_done_callback(lambda task: self._forget(rid, expect.ticket, task))
        if slot is not None:
            # Does nothing where the task itself said how it ended.
            task.add_done_callback(
                lambda _task: slot.failed(RequestCancelledError("the request was cancelled"))
            )
        return expect

    def cancel(self, rid: str) -> None:
        """The request is over before its items arrived; does nothing for any other."""
        live = self._live.get(rid)
        if live is not None:
            live.task.cancel()

    def _forget(self, rid: str, ticket: str, task: asyncio.Task[EpdError | None]) -> None:
        live = self._live.get(rid)
        if live is not None and live.ticket == ticket:
            del self._live[rid]
        error: EpdError | None = RequestCancelledError("the request was cancelled")
        if not task.cancelled():
            surprise = task.exception()
            if surprise is not None:
                logger.error("Could not end %s", rid, exc_info=surprise)
            error = EncodeError("its end is unknown") if surprise else task.result()
        self.on_end(rid, error)

    def cancel_all(self) -> None:
        """Every request is over."""
        for live in self._live.values():
            live.task.cancel()

    async def _run(
        self,
        rid: str,
        items: list[EncodeItem],
        expect: Expect,
        slot: Slot | None,
        among: Collection[str] | None,
    ) -> EpdError | None:
        started = time.monotonic()
        deadline = started + expect.ttl_s
        try:
            endpoint = await self._control.endpoint(min(_RECEIVER_TIMEOUT_S, expect.ttl_s))
            await self._control.expect(expect)
            reply_to = ReplyTo(endpoint, expect.ticket)
            layouts = await self._dispatcher.run(reply_to, items, deadline, among)
            if slot is not None:
                slot.learnt([layouts.get(item.item) for item in items])
            elapsed_ms = (time.monotonic() - started) * 1e3
            logger.info("Encoded %d items of %s in %.1f ms", len(items), rid, elapsed_ms)
        except asyncio.CancelledError:
            logger.info("Cancelled %d items of %s", len(items), rid)
            await self._control.cancel(expect.ticket)
            return RequestCancelledError("the request was cancelled")
        except EpdError as error:
            logger.warning("Could not encode %s: %s (%s)", rid, error, error.code)
            return await self._fail(expect, slot, error)
        except Exception:
            logger.exception("Could not encode %s", rid)
            unknown = EncodeError("the request's media could not be dispatched")
            return await self._fail(expect, slot, unknown)
        return None

    async def _fail(self, expect: Expect, slot: Slot | None, error: EpdError) -> EpdError:
        if slot is not None:
            slot.failed(error)
        await self._control.fail(expect.ticket, error)
        return error
