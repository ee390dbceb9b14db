"""The tokenizer process's `mm_receiver`: plans requests and has their media encoded.

Leans on `managers.tokenizer_manager.TokenizerManager`: it calls
`create_mm_receiver(server_args, dtype=, hf_config=, encode_urls=)` once and
`auto_create_handle_loop()` at each request, in its event loop; `generate_request(obj, request)`,
whose answers begin when all of this is done; `send_encode_request(obj, ...)`
for each request with media, before it tokenizes, or, with
the backend zmq_to_tokenizer, `await recv_mm_data(...)` for each prompt while it does;
`abort_request(rid)` when a request is over early, or, before a scheduler has it,
`_release_req_states_on_failure(request_states)`, by their ids; `_tokenize_one_request(obj)` for
each prompt, when neither a pause nor an update of weights holds it back, which ends with
`_create_tokenized_object(obj, ...)`; `_send_one_request(tokenized)` (of n > 1 see `samples`);
`_wait_one_response(obj, request)`, which yields its answers; and
`_handle_abort_finish_reason(out, state, is_stream)` when the scheduler ended it. The live
requests are in its `rid_to_state`, each with its `obj`, and `dispatched` once a scheduler has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import torch

from sglang_epd.errors import (
    EncodeError,
    EpdError,
    MediaError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.language import manifest, reading
from sglang_epd.language.assembly import assemble
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.layouts import Board, Slot
from sglang_epd.language.planner import entries, has_content_hashes, plan
from sglang_epd.seams import (
    adaptive,
    bootstrap,
    embeddings,
    samples,
    tracing,
)
from sglang_epd.seams.large_bodies import Turns, stop_at_the_first_error
from sglang_epd.seams.precomputed import have_embeddings
from sglang_epd.seams.requests import aborted_when_left, client, refuse
from sglang_epd.tally import LoopLag
from sglang_epd.transfer.control import Control
from sglang_epd.wire.http import EncodeItem, ItemLayout
from sglang_epd.wire.messages import MAX_ITEMS, Expect

logger = logging.getLogger(__name__)


class TokenizerSeam:
    """Stands as `TokenizerManager.mm_receiver` while this package serves EPD."""

    def __init__(
        self,
        frontend: Frontend,
        control: Control,
        request_timeout_s: float,
        *,
        lays_out: Callable[[Any], Any] | None = None,
        plan: Callable[[Any], list[EncodeItem]] = plan,
        observe_lag: Callable[[float], None] = lambda _seconds: None,
        tells_sources: bool = True,
        secret: bytes = b"",
    ) -> None:
        self._tells_sources = tells_sources
        self.frontend = frontend
        # Of the event loop that all of a tokenizer process runs in.
        self.lag = LoopLag(observe_lag)
        # Of bodies of many parts, which are read before all else.
        self.turns = Turns()
        # Where a prompt may be encoded here: decides, and does it.
        self.adaptive: adaptive.Adaptive | None = None
        self._control = control
        self._timeout_s = request_timeout_s
        # Of this server: another that this process starts has another one.
        self._secret = secret
        # On a prefill server: the layouts for its decode servers (`seams/bootstrap.py`).
        self.layouts: Board | None = None
        # Where prompts are laid out here: makes what does it of SGLang's processor.
        self._lays_out = lays_out
        self._plan = plan
        self._processor: Any = None
        self._context_tokens = 0
        # By id; each has SGLang's object of the request.
        self._live: dict[str, Any] = {}
        # Of prompts that are being tokenized, which may take until their items are here.
        self._tokenizing: set[str] = set()

    def attach(self, manager: Any) -> None:
        """Find the live requests, the processor and the bootstrap server of the manager that
        this is part of, and the routes that lead to it.

        Raises:
            ConfigError: the model cannot have its encoder apart, and why.
        """
        self._live, self._context_tokens = manager.rid_to_state, manager.context_len
        self.layouts = bootstrap.board_of(manager.bootstrap_server)
        stop_at_the_first_error()
        if self._lays_out is not None:
            self._processor = self._lays_out(manager.mm_processor)
        elif manager.mm_processor is not None:
            # Or a scheduler would tokenize the text, between two of its passes.
            manager.mm_processor.generates_input_ids_from_raw_prompt = False

    def begun(self) -> None:
        """After `auto_create_handle_loop`: SGLang has laid the current request out.

        What its next turn wakes runs when this task waits next, and the request is planned
        by then.
        """
        self.lag.start()
        self.turns.end()

    def begin_to_encode(self, original: Any, manager: Any, obj: Any) -> None:
        """Around `_handle_epd_disaggregation_encode_request`, which knows generation only, and
        media only.

        Raises:
            ValueError: as of `send_encode_request`.
        """
        prompts = adaptive.with_media(obj)
        try:
            if have_embeddings(prompts):
                obj.need_wait_for_mm_inputs = False
                return
            if self._lays_out is None:
                _check_answers(prompts)
        except MediaError as error:
            _refuse([self._slot(prompt) for prompt in prompts], error)
            raise ValueError(error.message) from None
        asks_embedding = embeddings.asks(obj)
        begin = partial(embeddings.begin, self.send_encode_request) if asks_embedding else original
        if self.adaptive is not None:
            self.adaptive.handle(begin, manager, obj)
        else:
            begin(manager, obj)

    @staticmethod
    def carry(
        original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **options: Any
    ) -> Any:
        """Around `_create_tokenized_object`: the manifest goes along."""
        tokenized = original(manager, obj, *args, **options)
        manifest.hand_on(obj, tokenized)
        return tokenized

    def send_encode_request(
        self, obj: Any, time_stats_json: str | None = None, on_dispatch_error: Any = None
    ) -> None:
        """Plan and dispatch a request, or each prompt of a batch.

        Raises:
            ValueError: the media cannot be read; SGLang answers 400 with the message.
        """
        prompts = adaptive.with_media(obj)
        try:
            expected = self._start(prompts, sampled=samples.count(obj) > 1)
        except (MediaError, ProtocolError) as error:
            raise ValueError(error.message) from None
        reading.forget()
        for prompt, expect in zip(prompts, expected, strict=True):
            prompt.need_wait_for_mm_inputs = True
            if expect is not None:
                manifest.attach(prompt, manifest.write(expect, self._secret))

    def send(self, original: Callable[..., Awaitable[None]], manager: Any, one: Any) -> Any:
        """Around `_send_one_request`: a prompt with n > 1 is announced in its turn, and each of
        its samples for itself."""
        if self._lays_out is not None:
            return _sent(original, manager, one)
        state = self._live.get(one.rid)
        sampled = None if state is None else samples.find(state.obj)
        if sampled is not None and manifest.waits(one):
            manifest.carry(one, manifest.write(sampled.next(one.rid), self._secret))
        return original(manager, one)

    def refused(self, room: Any, error: EpdError) -> None:
        """A request was refused before it was begun: its decode server hears of it.

        Args:
            room: its bootstrap room, or those of its prompts, as the user wrote them.
        """
        for slot in self._slots(room):
            slot.failed(error)

    def _slots(self, room: Any) -> list[Slot]:
        """A new one for each of those rooms that is a room; none of more rooms than a request may
        have: they are other requests' too."""
        board, rooms = self.layouts, room if isinstance(room, list) else [room]
        if board is None or len(rooms) > MAX_ITEMS:
            return []
        return [board.open(one, self._timeout_s) for one in rooms if isinstance(one, int)]

    def read_first(
        self, original: Any, manager: Any, obj: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """Around `generate_request`: the media of a large request are read in a thread before
        anything of it is begun. From now on a decode server waits, and hears of what ends before
        its media are planned."""
        answers: AsyncGenerator[dict[str, Any]] = original(manager, obj, *args, **options)
        try:
            found = entries(obj)
        except MediaError:
            return answers  # its plan says so
        if reading.is_large(found):
            answers = _after_reading(answers, obj, found)
        slots = self._slots(getattr(obj, "bootstrap_room", None)) if found else []
        return _told(answers, slots) if slots else answers

    async def send_again(self, rid: str, expect: Expect) -> None:
        """A scheduler needs items of a live request after all.

        Raises:
            EpdError: they are not there any more.
        """
        await self._read_if_large(rid)
        state = self._live.get(rid)
        if state is None:
            raise RequestCancelledError("the request is over")
        self.frontend.again(rid, self._plan(state.obj), expect, tracing.span_of(state))

    async def _read_if_large(self, rid: str) -> None:
        """Of a live request, in a task of its own."""
        state = self._live.get(rid)
        if state is not None and reading.is_large(found := entries(state.obj)):
            await reading.beforehand(found, hashed=has_content_hashes(state.obj))

    async def recv_mm_data(
        self,
        request_obj: Any,
        mm_processor: Any,
        prompt: str | list[int],
        need_wait_for_mm_inputs: bool | None = True,
    ) -> Any:
        """Have a prompt's items encoded and wait for them; returns its `mm_inputs`.

        None if there is nothing to encode, the media are embeddings, or SGLang decided (False:
        None is what the prompts of a batch come with) to process the media on this server.

        Raises:
            fastapi.HTTPException, StreamError: as of `refuse`.
        """
        from sglang.srt.runtime_context import get_disagg

        # A user may write the field; without a tower here it means nothing.
        may_be_local = get_disagg().enable_adaptive_dispatch_to_encoder
        local = may_be_local and need_wait_for_mm_inputs is False
        if local or not request_obj.contains_mm_input() or have_embeddings([request_obj]):
            return None
        outcome = await self._collect(request_obj, prompt)
        if not isinstance(outcome, EpdError):
            return outcome
        # Not where the error was caught: with it the exception would keep the items alive.
        refuse(request_obj, outcome)

    def cancel(self, rid: str = "", abort_all: bool = False) -> None:
        """After `abort_request`: encoders hear of it.

        Not of a request that SGLang has answered: its items have come, and an encoder's word on
        them may be on its way. Nor, of all requests, of those that wait for the end of a pause or
        of an update of weights, which SGLang then serves.
        """
        if abort_all:
            self.frontend.cancel_all(self._is_begun)
        elif rid in self._live:
            self.frontend.cancel(rid)

    def _is_begun(self, rid: str) -> bool:
        state = self._live.get(rid)
        # The id of a request with several samples is not among them any more.
        return state is None or state.dispatched or rid in self._tokenizing

    async def tokenize(self, original: Any, manager: Any, prompt: Any) -> Any:
        """Around `_tokenize_one_request`, which nothing holds back any more. Where items are
        received here, it takes until they have come, and before any answer is waited for.

        Raises:
            fastapi.HTTPException: with the status and message for the user.
        """
        self._tokenizing.add(prompt.rid)
        try:
            waits = self._lays_out is not None and prompt.contains_mm_input()
            http = client() if waits else None
            async with aborted_when_left(manager, prompt, http, self.frontend.cancel):
                if self.adaptive is None:
                    return await original(manager, prompt)
                return await self.adaptive.tokenize(original, manager, prompt)
        finally:
            self._tokenizing.discard(prompt.rid)

    def cancel_refused(self, request_states: dict[str, Any]) -> None:
        """After `_release_req_states_on_failure`: SGLang has refused a request that was sent to
        encoders before it was counted and compared with the model's context.

        Not one that it has answered: SGLang cleans up after each answer that is not a stream,
        and an encoder's word on the items may be on its way.
        """
        for rid, state in request_states.items():
            if rid not in self._live and not state.finished:
                self.frontend.cancel(rid)

    def attend(self, original: Any, manager: Any, obj: Any, *args: Any, **options: Any) -> Any:
        """Around `_wait_one_response`: a request with media is aborted when its client leaves,
        and its answers say where the media came from."""
        answers = original(manager, obj, *args, **options)
        if not obj.contains_mm_input():
            return answers
        http = args[0] if args else options.get("request")
        return self._attended(answers, aborted_when_left(manager, obj, http), obj.rid)

    async def _attended(
        self,
        answers: AsyncGenerator[dict[str, Any]],
        watched: contextlib.AbstractAsyncContextManager[None],
        rid: str,
    ) -> AsyncGenerator[dict[str, Any]]:
        async with contextlib.aclosing(answers), watched:
            async for answer in answers:
                account = self.frontend.account(rid) if self._tells_sources else None
                if account is not None:
                    answer["meta_info"]["media_sources"] = account
                yield answer

    async def answer_before_streaming(
        self, original: Any, manager: Any, out: dict[str, Any], state: Any, is_stream: bool
    ) -> Any:
        """Around `_handle_abort_finish_reason`: a stream that fails before its first token
        gets an HTTP status, not an event.

        SGLang turns the `ValueError` that the non-streaming case raises into a 400 when it
        comes before the first chunk.
        """
        status = out["meta_info"]["finish_reason"].get("status_code")
        unborn = is_stream and not out["meta_info"].get("completion_tokens")
        # A stream is a generation.
        if (
            unborn
            and state.obj.need_wait_for_mm_inputs
            and status is not None
            and 400 <= status < 500
        ):
            out["meta_info"]["finish_reason"]["status_code"] = 400
            return await original(manager, out, state, False)
        return await original(manager, out, state, is_stream)

    async def _collect(self, request: Any, prompt: str | list[int]) -> Any:
        """A prompt's `mm_inputs`, or the error that it ends with."""
        try:
            (expect,) = self._start([request])
            assert expect is not None
            items = await self._control.collect(expect)
            if (request.sampling_params or {}).get("n", 1) > 1:
                # SGLang keeps them until all prompts beside it are in the prefix cache.
                items = [one.copied() for one in items]
            return assemble(self._processor, prompt, items, self._context_tokens)
        except EpdError as error:
            error.__cause__ = error.__context__ = None  # their traces hold the items too
            return error.with_traceback(None)
        except Exception:
            # An error that a model's processor makes of one prompt ends that request only.
            logger.exception("Could not lay out the prompt of %s", request.rid)
            return EncodeError("the prompt could not be laid out with its media")
        except asyncio.CancelledError:
            self.frontend.cancel(request.rid)
            raise

    def _start(self, prompts: list[Any], *, sampled: bool = False) -> list[Expect | None]:
        """All of the prompts, or none of them; of those with n > 1 the first one, while the others
        are announced in their turn."""
        if self.layouts is not None and len(prompts) > MAX_ITEMS:
            raise MediaError(f"a prefill server takes at most {MAX_ITEMS} prompts a request")
        slots = [self._slot(prompt) for prompt in prompts]
        started: list[Expect | None] = []
        before: samples.Sampled | None = None
        try:
            planned = [self._planned(prompt) for prompt in prompts]
            for prompt, items, slot in zip(prompts, planned, slots, strict=True):
                begin = partial(self._begin, items, slot, {})
                if not sampled:
                    started.append(begin(prompt.rid)[0])
                    continue
                one = samples.Sampled(prompt.rid, begin)
                samples.mark(prompt, one)
                if before is None:
                    one.announce()
                else:
                    before.following = one
                before = one
                started.append(None)
        except Exception as error:
            # SGLang ends all of the request: none of its parts may be waited for.
            for prompt in prompts[: len(started)]:
                self.frontend.cancel(prompt.rid)
            _refuse(slots, error)
            raise
        return started

    def _begin(
        self, items: list[EncodeItem], slot: Slot | None, known: dict[int, ItemLayout], rid: str
    ) -> samples.Begun:
        """Announce a request's items."""
        parent = tracing.span_of(self._live.get(rid))
        expect = self.frontend.start(rid, items, slot, known=known, parent=parent)
        return expect, self.frontend.underway(rid)

    def _planned(self, prompt: Any) -> list[EncodeItem]:
        """A prompt's items, planned once."""
        decided = None if self.adaptive is None else self.adaptive.planned(prompt.rid)
        return self._plan(prompt) if decided is None else decided

    def _slot(self, prompt: Any) -> Slot | None:
        # Embeddings are not asked for across servers.
        room = getattr(prompt, "bootstrap_room", None)
        if self.layouts is None or not isinstance(room, int):
            return None
        return self.layouts.open(room, self._timeout_s)


def _check_answers(prompts: list[Any]) -> None:
    """Refuse what this process cannot tell of a prompt that a scheduler lays out.

    Raises:
        MediaError: its token ids are asked for.
    """
    if any(getattr(prompt, "return_prompt_token_ids", False) for prompt in prompts):
        raise MediaError(
            "the token ids of a prompt with media are not returned with this server's "
            "--encoder-transfer-backend; with zmq_to_tokenizer they are"
        )


async def _sent(original: Callable[..., Awaitable[None]], manager: Any, one: Any) -> None:
    """A prompt whose items were received here; SGLang keeps it until its answer has ended."""
    await original(manager, one)
    for item in one.mm_inputs.mm_items if one.mm_inputs else ():
        # Not one that SGLang has put into shared memory for its schedulers.
        if isinstance(item.precomputed_embeddings, torch.Tensor):
            item.precomputed_embeddings = None


def _refuse(slots: list[Slot | None], error: Exception) -> None:
    """A decode server does not wait for a request that was refused."""
    if not isinstance(error, EpdError):
        error = EncodeError("the request's media could not be dispatched")
    for slot in slots:
        if slot is not None:
            slot.failed(error)


async def _told(
    answers: AsyncGenerator[dict[str, Any]], slots: list[Slot]
) -> AsyncGenerator[dict[str, Any]]:
    """The slots are those from before the media are planned."""
    async with contextlib.aclosing(answers):
        try:
            async for answer in answers:
                yield answer
        except Exception as error:
            _refuse([*slots], _as_told(error))
            raise
        except BaseException:
            _refuse([*slots], RequestCancelledError("the request ended at its prefill server"))
            raise
    for slot in slots:
        slot.unplanned()


def _as_told(error: Exception) -> EpdError:
    """What a decode server hears of an error that SGLang answers by its status, or with 400."""
    if isinstance(error, ValueError):
        return MediaError(str(error))
    status, text = getattr(error, "status_code", 500), str(getattr(error, "detail", error))
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return UnavailableError(text)
    return MediaError(text) if 400 <= status < 500 else EncodeError(text)


async def _after_reading(
    answers: AsyncGenerator[dict[str, Any]], obj: Any, found: list[Any]
) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(answers):
        await reading.beforehand(found, hashed=has_content_hashes(obj))
        try:
            async for answer in answers:
                reading.forget()
                yield answer
        finally:
            reading.forget()
