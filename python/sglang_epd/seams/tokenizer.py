"""The tokenizer process's seam: SGLang's multimodal receiver, as its manager calls it.

Leans on `managers.tokenizer_manager.TokenizerManager`: it calls
`create_mm_receiver(server_args, dtype=, hf_config=, encode_urls=)` once and
`send_encode_request(obj, ...)` for each request with media, before it tokenizes;
`abort_request(rid)` when a request is over early; and
`_handle_abort_finish_reason(out, state, is_stream)` when the scheduler ended it.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_epd.config import Settings
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.dispatcher import Dispatcher
from sglang_epd.dispatch.policies import policy
from sglang_epd.errors import MediaError
from sglang_epd.language import manifest
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.planner import plan
from sglang_epd.namespace import checkpoint_folder, namespace
from sglang_epd.seams import rundir
from sglang_epd.seams.hooks import hook
from sglang_epd.transfer.control import Control

logger = logging.getLogger(__name__)

_MODULE = "sglang.srt.managers.tokenizer_manager"


class TokenizerSeam:
    """What `TokenizerManager.mm_receiver` is while this package serves EPD."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend

    def send_encode_request(
        self, obj: Any, time_stats_json: str | None = None, on_dispatch_error: Any = None
    ) -> None:
        """Plan and dispatch a request, or each prompt of a batch.

        Raises:
            ValueError: the media cannot be read; SGLang answers 400 with the message.
        """
        prompts = [obj] if obj.is_single else [obj[index] for index in range(obj.batch_size)]
        samples = getattr(obj, "parallel_sample_num", 1)
        try:
            planned = [(prompt, plan(prompt)) for prompt in prompts if prompt.contains_mm_input()]
        except MediaError as error:
            raise ValueError(error.message) from None
        for prompt, items in planned:
            # With n > 1 SGLang sends the prompt once to fill the prefix cache, then
            # once a sample; each of them waits for the same items.
            consumers = 1 if samples == 1 else samples + 1
            expect = self.frontend.start(prompt.rid, items, consumers)
            prompt.need_wait_for_mm_inputs = True
            prompt.encoder_urls = manifest.write(expect)


def create_frontend(
    server_args: Any, dtype: Any = None, hf_config: Any = None, encode_urls: Any = None
) -> TokenizerSeam:
    """Stands in for `create_mm_receiver` in the tokenizer process."""
    from sglang.srt.runtime_context import get_model

    settings = Settings.from_env()
    folder = checkpoint_folder(get_model().model_path, get_model().revision)
    identity = namespace(hf_config, folder, str(dtype).removeprefix("torch."))
    urls: list[str] = encode_urls if encode_urls is not None else []
    dispatcher = Dispatcher(
        client=EncoderClient(settings.token),
        urls=lambda: [url.rstrip("/") for url in urls],
        policy=policy(settings.dispatch_policy),
        namespace=identity,
    )
    rundir.remove_at_exit()
    control = Control(rundir.control_path())
    seam = TokenizerSeam(Frontend(dispatcher, control, settings.request_timeout_s))
    hook(_MODULE, "TokenizerManager.abort_request", _cancel_at_encoders, "after")
    method = "TokenizerManager._handle_abort_finish_reason"
    hook(_MODULE, method, _answer_before_streaming, "around")
    logger.info("EPD language server: namespace %s, encoders %s", identity, urls or "none yet")
    return seam


def _cancel_at_encoders(
    _result: None, manager: Any, rid: str = "", abort_all: bool = False
) -> None:
    if abort_all:
        manager.mm_receiver.frontend.cancel_all()
    elif rid:
        manager.mm_receiver.frontend.cancel(rid)


async def _answer_before_streaming(
    original: Any, manager: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """A stream that fails before its first token gets an HTTP status, not an event.

    SGLang turns the `ValueError` that the non-streaming case raises into a 400 when it
    comes before the first chunk.
    """
    status = out["meta_info"]["finish_reason"].get("status_code")
    unborn = is_stream and not out["meta_info"].get("completion_tokens")
    if unborn and state.obj.need_wait_for_mm_inputs and status is not None and 400 <= status < 500:
        out["meta_info"]["finish_reason"]["status_code"] = 400
        return await original(manager, out, state, False)
    return await original(manager, out, state, is_stream)
