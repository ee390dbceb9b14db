"""Adaptive dispatch: a language server with a tower, and the images that it encodes itself.

Under `--enable-adaptive-dispatch-to-encoder` SGLang asks for each request whether encoders
are to have it, and processes the others as one server would. SGLang's rule is that those of
fewer items than `SGLANG_ENCODER_DISPATCH_MIN_ITEMS` stay. Here they stay only while no other
request waits for its first token, because that one would wait for the tower as well. Images
that stay are read by the rules of encoders (`language/local_images.py`). A scheduler sees a
request of images that was sent when the first of them has landed. Until then, if no encoder takes
it, it is taken back.

Leans on `managers.tokenizer_manager.TokenizerManager`: `generate_request` calls
`_handle_epd_disaggregation_encode_request(obj)`,
which asks `_should_dispatch_to_encoder(obj)` and sets `need_wait_for_mm_inputs`; then
`_tokenize_one_request(obj)` for each prompt, which leaves the media of those that do not
wait to SGLang's own processor, takes PIL images, and returns an object with `mm_inputs`.
All of them run in the request's own task. `rid_to_state` has the live requests, and
`time_stats.first_token_time` of each is 0 until there is one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang_epd.config import Settings
from sglang_epd.dispatch.pool import Health, Pool, Snapshot
from sglang_epd.errors import (
    EncoderLostError,
    EpdError,
    MediaError,
    NamespaceError,
    OverloadedError,
    UnavailableError,
)
from sglang_epd.language import manifest
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.local_images import LocalImages
from sglang_epd.language.planner import plan
from sglang_epd.machine import decode_mb, share_mb
from sglang_epd.media import MediaLimits
from sglang_epd.modality import IMAGE
from sglang_epd.seams import identities, requests, roles
from sglang_epd.wire.http import EncodeItem

if TYPE_CHECKING:  # imports prometheus_client, which SGLang must come before
    from sglang_epd.observability.language import DecisionMetrics

logger = logging.getLogger(__name__)

# A request of this kind of failure has not been the encoders' work: the tower here may
# have it. Not one that they failed at, which this server is not to fail at as well.
_CURABLE = (UnavailableError, OverloadedError, NamespaceError)
# How often it is looked whether the client is still there, and an encoder; and at how many
# looks in a row there may be none, before the tower here takes over.
_LOOK_S = 0.5
_LOOKS_WITHOUT = 2


@dataclass
class _Request:
    """One request, in the task that serves it.

    Attributes:
        deadline: on `time.monotonic`.
        items: of each prompt, by id.
        sent: of each prompt whose items go to encoders, what is told of them; None where nothing
            has been sent yet (zmq_to_tokenizer), and an exception tells.
    """

    deadline: float
    items: dict[str, list[EncodeItem]]
    sent: dict[str, asyncio.Future[EpdError | None] | None] = field(default_factory=dict)


_current: ContextVar[_Request | None] = ContextVar("sglang_epd_adaptive", default=None)


class Adaptive:
    """Decides where media are encoded, and encodes the images that stay.

    Args:
        frontend: sends requests to encoders, and reports how they end.
        images: reads images that stay.
        snapshot: the encoders now.
        min_items: requests of fewer may stay.
        metrics: counts decisions.
        timeout_s: a request's deadline.
    """

    def __init__(
        self,
        *,
        frontend: Frontend,
        images: LocalImages,
        snapshot: Callable[[], Snapshot],
        min_items: int,
        metrics: DecisionMetrics,
        timeout_s: float,
        plan: Callable[[Any], list[EncodeItem]] = plan,
    ) -> None:
        self._plan = plan
        self._frontend = frontend
        self._images = images
        self._snapshot = snapshot
        self._min_items = min_items
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._seen: set[tuple[str, str]] = set()
        self._forced = ""

    def should_dispatch(self, _original: Any, manager: Any, obj: Any) -> bool:
        """Around `_should_dispatch_to_encoder`: all prompts of a request go one way.

        Raises:
            ValueError: the media cannot be read; SGLang answers 400 with the message.
        """
        prompts = with_media(obj)
        try:
            items = {prompt.rid: self._plan(prompt) for prompt in prompts}
        except MediaError as error:
            raise ValueError(error.message) from None
        if _of_a_session(obj):
            where, why = "remote", "session"
        else:
            where, why = self._decide([item for planned in items.values() for item in planned])
        if (where, why) == ("local", "few") and _others_wait(manager, obj):
            where, why = "remote", "load"
        for _ in prompts:
            self._count(where, why)
        request = _Request(time.monotonic() + self._timeout_s, items)
        _current.set(request)
        if where == "remote":
            request.sent = dict.fromkeys(items)
            return True
        for prompt in prompts:
            # SGLang does not copy the request's own to the prompts of a batch.
            prompt.need_wait_for_mm_inputs = False
        return False

    def planned(self, rid: str) -> list[EncodeItem] | None:
        """The items of the current request's prompt, where it was planned for the decision."""
        request = _current.get()
        return None if request is None else request.items.get(rid)

    def handle(self, original: Any, manager: Any, obj: Any) -> None:
        """Around `_handle_epd_disaggregation_encode_request`: see how dispatches go."""
        _current.set(None)
        original(manager, obj)
        request = _current.get()
        if request is None:
            return
        for prompt in _prompts(obj):
            if prompt.rid in request.sent:
                request.sent[prompt.rid] = self._frontend.underway(prompt.rid)

    async def tokenize(self, original: Any, manager: Any, prompt: Any) -> Any:
        """Around `_tokenize_one_request`: a prompt's images are encoded here, or elsewhere, where
        one of them has been when it returns.

        Raises:
            fastapi.HTTPException: with the status and message for the user.
        """
        request = _current.get()
        items = request.items.get(prompt.rid) if request is not None else None
        if request is None or items is None:
            return await original(manager, prompt)
        if prompt.rid not in request.sent:
            return await self._here(original, manager, prompt, items, request.deadline)
        if not _local(items) or _of_a_session(prompt):
            return await original(manager, prompt)
        underway = request.sent[prompt.rid]
        if underway is not None and len(request.sent) > 1:
            # SGLang sends the prompts of a batch one after the other. Those behind one that waited
            # here would not be claimed, and could hold the memory that it waits for.
            return await original(manager, prompt)
        tokenized, reason = await self._elsewhere(original, manager, prompt, underway)
        if not reason:
            return tokenized
        logger.warning("Encoding %s here: %s", prompt.rid, reason)
        self._count("local", "failed")
        prompt.need_wait_for_mm_inputs = False
        manifest.attach(prompt, None)
        return await self._here(original, manager, prompt, items, request.deadline)

    async def _here(
        self, original: Any, manager: Any, prompt: Any, items: list[EncodeItem], deadline: float
    ) -> Any:
        """As one server does it, but for how media are read."""
        try:
            read = await self._images.read(items, deadline)
        except EpdError as error:
            streams = getattr(prompt, "stream", False) and error.status < 500
            if error.status == HTTPStatus.BAD_REQUEST or streams:
                # Of a stream too this is an answer with a status, before it begins.
                raise ValueError(error.message) from None
            requests.refuse(prompt, error)
        self._frontend.encoded_here(prompt.rid, len(read))
        prompt.image_data = [
            _with_options(one.image, item) for one, item in zip(read, items, strict=True)
        ]
        if getattr(prompt, "mm_content_hashes", None) is not None:
            # Compared with the media already; SGLang would compare them with the pixels.
            prompt.mm_content_hashes = None
        tokenized = await original(manager, prompt)
        found = tokenized.mm_inputs.mm_items if tokenized.mm_inputs else []
        places = sum(len(item.offsets or ()) for item in found)
        if places < len(read):
            raise ValueError(
                f"the prompt has {places} placeholders for {len(read)} images: "
                "placeholders do not match the media"
            )
        if found:
            identities.name_items(tokenized.mm_inputs, {IMAGE: [one.key for one in read]})
        return tokenized

    async def _elsewhere(
        self,
        original: Any,
        manager: Any,
        prompt: Any,
        underway: asyncio.Future[EpdError | None] | None,
    ) -> tuple[Any, str]:
        """The tokenized prompt once its images are under way, or why they are not and the tower
        here may have them."""
        work = asyncio.ensure_future(self._outcome(original, manager, prompt, underway))
        # SGLang looks after clients that leave only when the scheduler has the request.
        http = None if getattr(prompt, "background", False) else requests.client()
        without = 0
        try:
            while not (await asyncio.wait({work}, timeout=_LOOK_S))[0]:
                if http is not None and await http.is_disconnected():
                    raise ValueError(f"the client of {prompt.rid} has left")
                ready = any(view.state is Health.READY for view in self._snapshot().encoders)
                without = 0 if ready else without + 1
                if without == _LOOKS_WITHOUT:
                    return None, "no encoder is ready"
            tokenized, failure = work.result()
        finally:
            if not work.done():
                self._frontend.cancel(prompt.rid)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        # An image that ends encoders is not to end this server as well.
        lost = isinstance(failure, EncoderLostError)
        if isinstance(failure, _CURABLE) and not lost:
            return None, failure.message
        # Any other has reached the scheduler, too, which ends the request.
        return tokenized, ""

    async def _outcome(
        self,
        original: Any,
        manager: Any,
        prompt: Any,
        underway: asyncio.Future[EpdError | None] | None,
    ) -> tuple[Any, EpdError | None]:
        from fastapi import HTTPException

        try:
            tokenized = await original(manager, prompt)
        except (HTTPException, requests.StreamError) as error:
            # zmq_to_tokenizer: this curable error, and no other.
            if error.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return None, UnavailableError(str(error.detail))
        return tokenized, None if underway is None else await underway

    def _decide(self, items: Sequence[EncodeItem]) -> tuple[str, str]:
        """Where a request's items are to be encoded, and why.

        Only ready encoders count: with a tower here, no request has to wait for a silent
        encoder to come back.
        """
        if not _local(items):
            return "remote", "no_tower"
        ready = [view for view in self._snapshot().encoders if view.state is Health.READY]
        if not ready:
            return "local", "no_encoder"
        if all(view.busy for view in ready):
            return "local", "busy"
        return ("local", "few") if len(items) < self._min_items else ("remote", "items")

    def _count(self, where: str, why: str) -> None:
        """Count every decision; log a new reason and a change of mode."""
        self._metrics.decisions.labels(where, why).inc()
        new = (where, why) not in self._seen
        self._seen.add((where, why))
        # Not by choice.
        forced = why if why in ("no_encoder", "busy", "failed") else ""
        if new or forced != self._forced:
            level = logging.WARNING if forced else logging.INFO
            logger.log(level, "Encoding of media: %s (%s)", where, why)
        self._forced = forced


def with_media(obj: Any) -> list[Any]:
    """The prompts of a request that have media."""
    return [prompt for prompt in _prompts(obj) if prompt.contains_mm_input()]


def _prompts(obj: Any) -> list[Any]:
    return [obj] if obj.is_single else [obj[index] for index in range(obj.batch_size)]


def _with_options(image: Any, item: EncodeItem) -> Any:
    """A decoded picture, with the one option of pictures that a model here follows."""
    from sglang.srt.utils import ImageData

    side = item.options.get("max_long_side_pixel")
    return image if side is None else ImageData(image, max_long_side_pixel=side)


def _local(items: Sequence[EncodeItem]) -> bool:
    """Whether they may be encoded here: videos and sounds may not, because it is the
    encoder that looks into a container before FFmpeg does."""
    return all(item.modality == IMAGE for item in items)


def _of_a_session(obj: Any) -> bool:
    """Whether SGLang appends it to earlier turns, whose items would be beside its own: a tower is
    called on all items of a request or on none."""
    return bool(getattr(obj, "session_params", None))


def _others_wait(manager: Any, obj: Any) -> bool:
    """Whether another request than this one waits for its first token."""
    # Of a batch, and of several samples, a list.
    own = {obj.rid} if isinstance(obj.rid, str) else set(obj.rid)
    states = manager.rid_to_state.items()
    return any(state.time_stats.first_token_time == 0 for rid, state in states if rid not in own)


def create(
    frontend: Frontend,
    pool: Pool,
    settings: Settings,
    plan: Callable[[Any], list[EncodeItem]],
) -> Adaptive | None:
    """The adaptive decider of this tokenizer process; None without
    `--enable-adaptive-dispatch-to-encoder`."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_mm

    if not get_disagg().enable_adaptive_dispatch_to_encoder:
        return None
    from sglang_epd.observability.language import DecisionMetrics

    limits = MediaLimits.of(get_mm())
    least = envs.SGLANG_ENCODER_DISPATCH_MIN_ITEMS.get()
    logger.info("EPD: this server holds its tower, and requests of fewer than %d items stay", least)
    return Adaptive(
        frontend=frontend,
        images=LocalImages(
            pool.namespace,
            limits,
            fetched_bytes=share_mb() // 2 << 20,  # as an encoder's
            decode_bytes=(settings.decode_mb or decode_mb()) << 20,
        ),
        snapshot=pool.snapshot,
        min_items=least,
        metrics=DecisionMetrics(roles.registry()),
        timeout_s=settings.request_timeout_s,
        plan=plan,
    )
