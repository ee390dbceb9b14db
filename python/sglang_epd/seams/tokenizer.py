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
`_create_tokenized_object(obj, ...)`; `_send_one_request(tokenized)`, which for n > 1 takes copies
of what was made of a prompt, once to fill the prefix cache, and, when that is done for all prompts
of the request, once a sample, with the prompts' own states among those of the request until then;
`_wait_one_response(obj, request)`, which yields its answers; and
`_handle_abort_finish_reason(out, state, is_stream)` when the scheduler ended it. The live
requests are in its `rid_to_state`, each with its `obj`, and `dispatched` once a scheduler has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_epd import logs
from sglang_epd.checkpoint import processing, served
from sglang_epd.config import Settings
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.dispatcher import Dispatcher, Patience
from sglang_epd.dispatch.policies import policy
from sglang_epd.dispatch.pool import Health, Pool
from sglang_epd.dispatch.work import Costs, describe
from sglang_epd.errors import (
    EncodeError,
    EpdError,
    MediaError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.families import Family, family_of, takes_options
from sglang_epd.language import manifest, reading
from sglang_epd.language.assembly import assemble
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.layouts import Board, Slot
from sglang_epd.language.planner import content_key, entries, has_content_hashes, plan
from sglang_epd.namespace import namespace
from sglang_epd.observability.language import DispatchTally
from sglang_epd.seams import (
    adaptive,
    bootstrap,
    embeddings,
    receiving,
    roles,
    rundir,
    tracing,
)
from sglang_epd.seams.identities import plan_without_options
from sglang_epd.seams.large_bodies import Turns, stop_at_the_first_error
from sglang_epd.seams.precomputed import have_embeddings
from sglang_epd.seams.prompt import lays_out
from sglang_epd.seams.requests import aborted_when_left, client, noted
from sglang_epd.tally import LoopLag
from sglang_epd.transfer.control import Control
from sglang_epd.wire.http import EncodeItem, ItemLayout
from sglang_epd.wire.messages import Expect, Settled

logger = logging.getLogger(__name__)


# Beside SGLang's fields of a prompt, of which it makes copies.
_SAMPLED = "_sglang_epd_sampled"


@dataclass
class _Sampled:
    """A prompt with n > 1.

    Attributes:
        rid: its own.
        begin: announces its items for the request of such an id.
        expect: its announcement, until it is sent to a scheduler.
        outcome: of that, for its error, should it have one.
        following: the next prompt of the user's request.
    """

    rid: str = ""
    begin: Callable[[str], tuple[Expect, asyncio.Future[EpdError | None] | None]] | None = None
    expect: Expect | None = None
    outcome: asyncio.Future[EpdError | None] | None = None
    begun: bool = False
    following: _Sampled | None = None

    def announce(self) -> None:
        """Once; later calls do nothing."""
        if not self.begun and self.begin is not None:
            (self.expect, self.outcome), self.begun = self.begin(self.rid), True

    @property
    def error(self) -> EpdError | None:
        """Why its items were not to be had, if they were not."""
        done = self.outcome is not None and self.outcome.done() and not self.outcome.cancelled()
        return self.outcome.result() if self.outcome is not None and done else None


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
        self._live = manager.rid_to_state
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
        if getattr(obj, "parallel_sample_num", 1) > 1:
            for prompt in prompts:
                setattr(prompt, _SAMPLED, _Sampled())
        asks_embedding = embeddings.asks(obj)
        begin = partial(embeddings.begin, self.send_encode_request) if asks_embedding else original
        if self.adaptive is not None:
            self.adaptive.handle(begin, manager, obj)
        else:
            begin(manager, obj)

    # After `_init_req_state`.
    noted = staticmethod(noted)

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
            expected = self._start(prompts)
        except (MediaError, ProtocolError) as error:
            raise ValueError(error.message) from None
        reading.forget()
        for prompt, expect in zip(prompts, expected, strict=True):
            prompt.need_wait_for_mm_inputs = True
            if expect is not None:
                manifest.attach(prompt, manifest.write(expect, self._secret))

    def send(self, original: Callable[..., Awaitable[None]], manager: Any, one: Any) -> Any:
        """Around `_send_one_request`. Where samples are asked for, a prompt is announced when the
        one before it is sent to fill the prefix cache, and each sample for itself: nothing is
        held for long beside what SGLang waits for."""
        state = self._live.get(one.rid)
        sampled: _Sampled | None = getattr(state and state.obj, _SAMPLED, None)
        if sampled is not None and sampled.begin is not None and manifest.waits(one):
            sampled.announce()
            told: Expect | Settled | None
            told, sampled.expect = sampled.expect, None
            if told is None and (error := sampled.error) is not None:
                # Where answers are streamed SGLang asks for samples all the same.
                told = Settled("", (), error.code, error.message)
            elif told is None:
                told, _ = sampled.begin(one.rid)
            manifest.carry(one, manifest.write(told, self._secret))
            if sampled.following is not None:
                sampled.following.announce()
        if sampled is not None or self._lays_out is None:
            return original(manager, one)
        return _sent(original, manager, one)

    def refused(self, room: Any, error: EpdError) -> None:
        """A request was refused before it was laid out.

        Args:
            room: its bootstrap room, or those of its prompts, as the user wrote them.
        """
        if self.layouts is not None:
            for one in room if isinstance(room, list) else [room]:
                if isinstance(one, int):
                    self.layouts.open(one, self._timeout_s).failed(error)

    def read_first(
        self, original: Any, manager: Any, obj: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[dict[str, Any]]:
        """Around `generate_request`: the media of a large request are read in a thread before
        anything of it is begun."""
        answers: AsyncGenerator[dict[str, Any]] = original(manager, obj, *args, **options)
        try:
            found = entries(obj)
        except MediaError:
            return answers  # its plan says so
        return _after_reading(answers, obj, found) if reading.is_large(found) else answers

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
            fastapi.HTTPException: with the status and message for the user.
        """
        from fastapi import HTTPException
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
        raise HTTPException(outcome.http_status, outcome.message)

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
            if getattr(request, _SAMPLED, None) is not None:
                # It keeps them until all prompts beside it are in the prefix cache.
                items = [one.copied() for one in items]
            return assemble(self._processor, prompt, items)
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

    def _start(self, prompts: list[Any]) -> list[Expect | None]:
        """All of the prompts, or none of them. One with n > 1 has no announcement yet: they are
        made when their turn comes (`send`), the first one now."""
        slots = [self._slot(prompt) for prompt in prompts]
        started: list[Expect | None] = []
        before: _Sampled | None = None
        try:
            planned = [self._planned(prompt) for prompt in prompts]
            for prompt, items, slot in zip(prompts, planned, slots, strict=True):
                sampled: _Sampled | None = getattr(prompt, _SAMPLED, None)
                if sampled is None or self._lays_out is not None:
                    started.append(self._begin(items, slot, {}, prompt.rid)[0])
                    continue
                sampled.rid = prompt.rid
                sampled.begin = partial(self._begin, items, slot, {})
                if before is None or self.adaptive is not None:
                    # Where the tower here may have its items, it is asked how they do.
                    sampled.announce()
                else:
                    before.following = sampled
                before = sampled
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
    ) -> tuple[Expect, asyncio.Future[EpdError | None] | None]:
        """Announce a request's items; returns what becomes of them, too."""
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


def create_frontend(
    server_args: Any, dtype: Any = None, hf_config: Any = None, encode_urls: Any = None
) -> TokenizerSeam:
    """Stands in for `create_mm_receiver` in the tokenizer process."""
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel, get_serving

    settings = Settings.from_env()
    logs.install()
    embeddings.give_field()
    checkpoint = served(whole=settings.fingerprint == "full")
    form = str(dtype).removeprefix("torch.")
    identity = namespace(hf_config, checkpoint, form, processing())
    logger.info(
        "EPD language server: namespace %s, encoders %s", identity, encode_urls or "none yet"
    )
    tally = DispatchTally(
        identity, (state.value for state in Health if state is not Health.GONE), roles.registry()
    )
    pool, costs = _pool(identity, tally), Costs()
    dispatcher = _dispatcher(settings, pool, costs, tally)
    if get_disagg().encoder_transfer_backend == "zmq_to_tokenizer":
        workers = get_serving().tokenizer_worker_num
        if workers > 1:
            rundir.draw_folder()
        bootstrap.ends_with_its_server(receiving.start(readers=1, receivers=workers).stop)
    control = Control(rundir.control_path())
    timeout_s = settings.request_timeout_s
    # Where the tokenizer receives, the scheduler hears of a request when its items are there;
    # where a prompt may be encoded here, when one of them is.
    to_scheduler = get_disagg().encoder_transfer_backend != "zmq_to_tokenizer"
    adapts = get_disagg().enable_adaptive_dispatch_to_encoder
    asks_prefix = receiving.asks_prefix(get_parallel(), get_memory().disable_radix_cache)
    frontend = Frontend(
        dispatcher,
        control,
        timeout_s,
        key=lambda item: content_key(item, identity),
        ask_prefix=to_scheduler and not adapts and asks_prefix,
        first_item=to_scheduler and adapts and settings.prefill_early != "off",
        tally=tally,
    )
    architecture = hf_config.architectures[0]
    lay_out = None if to_scheduler else partial(lays_out, architecture=architecture)
    planner = plan
    if not takes_options(architecture):
        planner = partial(plan_without_options, family=family_of(architecture) or Family())
    seam = TokenizerSeam(
        frontend,
        control,
        timeout_s,
        lays_out=lay_out,
        plan=planner,
        observe_lag=partial(tally.observe, "loop_lag_seconds", kind="tokenizer"),
        tells_sources=settings.tell_sources,
        secret=rundir.secret(),
    )
    control.listen(seam.send_again)
    seam.adaptive = adaptive.create(frontend, pool, settings, planner)
    return seam


def _pool(identity: str, tally: DispatchTally) -> Pool:
    """The encoders of this server, found and watched from now on."""

    def on_move(url: str, old: Health | None, new: Health, why: str) -> None:
        tally.moved(old.value if old else None, new.value, stays=new is not Health.GONE)
        ill = new in (Health.SUSPECT, Health.OPEN, Health.MISFIT)
        level = logging.WARNING if ill else logging.INFO
        logger.log(level, "Encoder %s: %s%s", url, new.value, f" ({why})" if why else "")

    pool = Pool(identity, on_move=on_move)
    bootstrap.start(pool, partial(tally.observe, "loop_lag_seconds", kind="watcher"))
    return pool


def _dispatcher(settings: Settings, pool: Pool, costs: Costs, tally: DispatchTally) -> Dispatcher:
    trust = bootstrap.trust()
    return Dispatcher(
        EncoderClient(trust.token, trust.client_ssl()),
        pool,
        policy(settings.dispatch_policy),
        describe=lambda items: describe(items, costs),
        learn=costs.learn,
        patience=Patience(settings.encoder_wait_s, settings.encoder_timeout_s),
        tally=tally,
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
