"""A decode server's prompts, laid out without their media.

SGLang's decode server fetches, decodes and preprocesses every image of a request only to
find out how many tokens it takes. Where the request's prefill server runs this package,
it is asked instead.

Leans on `managers.tokenizer_manager.TokenizerManager`: its `context_len`, and
`_tokenize_one_request`, which calls
`mm_processor.process_mm_data_async(image_data=, audio_data=, input_text=, request_obj=,
max_req_input_len=)` with the prompt already chosen. Its scheduler takes media items without
features, because it never runs a forward over a prompt.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sglang_epd import logs
from sglang_epd.errors import (
    ConfigError,
    EncodeError,
    EpdError,
    MediaError,
    ProtocolError,
    UnavailableError,
)
from sglang_epd.seams import bootstrap, roles, tracing
from sglang_epd.seams.prompt import lays_out
from sglang_epd.seams.requests import Watched, refuse
from sglang_epd.tally import LoopLag
from sglang_epd.wire.http import ItemLayout

if TYPE_CHECKING:  # imports prometheus_client, which SGLang must come before
    from sglang_epd.observability.language import DecodeMetrics

logger = logging.getLogger(__name__)


def set_up(manager: Any) -> None:
    """Have the prompts of a decode server laid out by what their prefill server knows, where
    that can be."""
    from sglang.srt.runtime_context import get_disagg

    disagg, processor = get_disagg(), manager.mm_processor
    # An instance that becomes a prefill server needs the media themselves; with made up KV there is
    # no prefill server.
    fake = disagg.disaggregation_transfer_backend == "fake"
    if disagg.enable_pd_role_switch or processor is None or fake:
        return
    from sglang_epd.language.layout_exchange import LayoutClient
    from sglang_epd.observability.language import DecodeMetrics

    try:
        # A copy, so that SGLang's own processing meets SGLang's own placeholders.
        layer = lays_out(copy.copy(processor), manager.model_config.hf_config.architectures[0])
    except ConfigError as error:
        # Its prefill server holds the tower itself, then.
        logger.info("Prompts are laid out as SGLang does it: %s", error)
        return
    logs.install()
    metrics = DecodeMetrics(roles.registry())
    Watched.lag = LoopLag(metrics.loop_lag_seconds.observe)
    prompts = DecodePrompts(
        processor=layer,
        original=processor.process_mm_data_async,
        ask=LayoutClient(bootstrap.trust().token).ask,
        default_port=disagg.disaggregation_bootstrap_port,
        context_tokens=manager.context_len,
        metrics=metrics,
        live=manager.rid_to_state,
    )
    processor.process_mm_data_async = prompts.process
    logger.info("EPD decode server: prompts are laid out by what their prefill server knows")


class DecodePrompts:
    """Replaces a decode server's `mm_processor.process_mm_data_async`.

    Args:
        processor: lays out a prompt (`get_validated_mm_data`).
        original: SGLang's own method, for requests whose prefill server tells no layouts.
        ask: (host, port, room) to layouts, as `LayoutClient.ask`.
        default_port: of a bootstrap server whose port the request does not say.
        context_tokens: longer prompts are refused before they are laid out: the request says
            which server is asked, so the answer may come from any server.
        live: the live requests by id, each with its `time_stats`.
    """

    def __init__(
        self,
        *,
        processor: Any,
        original: Callable[..., Awaitable[Any]],
        ask: Callable[[str, int, int], Awaitable[list[ItemLayout] | None]],
        default_port: int,
        context_tokens: int,
        metrics: DecodeMetrics,
        live: Mapping[str, Any],
    ) -> None:
        self._live = live
        self._processor = processor
        self._original = original
        self._ask = ask
        self._default_port = default_port
        self._context_tokens = context_tokens
        self._prompts = metrics.prompts

    async def process(self, *args: Any, request_obj: Any, input_text: Any, **options: Any) -> Any:
        """The prompt's `MultimodalProcessorOutput`.

        Raises:
            HTTPException: the request failed at its prefill server.
            StreamError: the same, of a stream of which an event is the first word.
        """
        try:
            parent = tracing.span_of(self._live.get(request_obj.rid))
            with parent.child("epd_lay_out") as span:
                output = await self._by_prefill(request_obj, input_text)
                span.note(layout="own" if output is None else "known")
        except EpdError as error:
            self._prompts.labels("refused" if error.http_status < 500 else "failed").inc()
            logger.warning("Prefill of %s failed: %s (%s)", request_obj.rid, error, error.code)
            refuse(request_obj, error)
        if output is not None:
            self._prompts.labels("known").inc()
            return output
        self._prompts.labels("own").inc()
        logger.info("Fetching the media of %s to lay it out", request_obj.rid)
        return await self._original(
            *args, request_obj=request_obj, input_text=input_text, **options
        )

    async def _by_prefill(self, request: Any, prompt: str | list[int]) -> Any:
        """None where there are no media to lay out, or the prefill tells no layouts.

        In all other cases nothing is fetched here: users bring them about.

        Raises:
            EpdError: the prompt cannot be laid out, or will not be prefilled.
        """
        from sglang_epd.language.assembly import lay_out
        from sglang_epd.language.planner import entries, modalities

        expected = modalities(request)
        if not expected or all(map(_is_made, entries(request))):
            return None
        host = getattr(request, "bootstrap_host", None)
        room = getattr(request, "bootstrap_room", None)
        if not isinstance(host, str) or not isinstance(room, int) or not 0 <= room < 1 << 64:
            raise ProtocolError(
                "a decode server takes media of requests that name their prefill server"
            )
        port = request.bootstrap_port
        items = await self._ask(host, port if isinstance(port, int) else self._default_port, room)
        if items is None:
            return None
        if [item.layout.modality for item in items] != expected:
            raise UnavailableError("the prefill server tells of other media than the request has")
        try:
            return lay_out(self._processor, prompt, items, self._context_tokens)
        except MediaError:
            raise
        except Exception:
            logger.exception("Could not lay out %s by its prefill's layouts", request.rid)
            raise EncodeError("the prompt could not be laid out with its media") from None


def _is_made(entry: Any) -> bool:
    """Whether it is pixels or rows, which a caller of `Engine` gives: JSON has no tensors."""
    return isinstance(entry, Mapping) and any(
        isinstance(value, torch.Tensor) for value in entry.values()
    )


def lays_out_prompts(manager: Any) -> bool:
    """Whether a decode server's prompts are laid out here."""
    process = getattr(manager.mm_processor, "process_mm_data_async", None)
    return isinstance(getattr(process, "__self__", None), DecodePrompts)
