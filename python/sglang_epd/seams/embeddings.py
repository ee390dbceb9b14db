"""Requests for an embedding of a prompt with media: `/v1/embeddings`, `/encode`, `Engine.encode`.

SGLang's EPD knows generation only: its `EmbeddingReqInput` and `TokenizedEmbeddingReqInput` have
no fields for a request that waits for encoders, and its tokenizer manager fails as it reads one.
Here the former gets them, and the latter carries its manifest as `language.manifest` says.

Leans on `managers.tokenizer_manager.TokenizerManager`: `generate_request` calls
`_handle_epd_disaggregation_encode_request(obj)`, which passes such a request over;
`_tokenize_one_request` reads the fields of each prompt and ends with
`_create_tokenized_object(obj, ...)`. In the scheduler on `managers.schedule_batch.Req`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_epd.language import manifest

# What SGLang reads of a generation request, and of each of the prompts of a batch.
_FIELDS = ("need_wait_for_mm_inputs", "encoder_urls")


def give_fields() -> None:
    """In a tokenizer process: requests of this kind may wait for encoders. A user cannot write
    these fields: they are none of the dataclass."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    for name in _FIELDS:
        setattr(EmbeddingReqInput, name, None)


def asks(obj: Any) -> bool:
    """Whether a request is of this kind."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    return isinstance(obj, EmbeddingReqInput)


def begin(send: Callable[[Any], None], manager: Any, obj: Any) -> None:
    """What `_handle_epd_disaggregation_encode_request` does of a generation request.

    Args:
        send: begins to have the media of a request encoded, unless they are only asked for when
            its prompts are tokenized.

    Raises:
        ValueError: as SGLang's own.
    """
    from sglang.srt.runtime_context import get_disagg

    if not obj.contains_mm_input():
        return
    disagg = get_disagg()
    obj.need_wait_for_mm_inputs = (
        not disagg.enable_adaptive_dispatch_to_encoder or manager._should_dispatch_to_encoder(obj)
    )
    if obj.need_wait_for_mm_inputs and disagg.encoder_transfer_backend != "zmq_to_tokenizer":
        send(obj)


def carry(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **options: Any) -> Any:
    """Around `_create_tokenized_object`: the manifest goes along."""
    tokenized = original(manager, obj, *args, **options)
    if asks(obj) and obj.encoder_urls is not None:
        manifest.carry(tokenized, obj.encoder_urls)
    return tokenized


def abortable(request: Any) -> Any:
    """The `Req` that a scheduler aborts a tokenized request of this kind by."""
    from sglang.srt.managers.schedule_batch import Req

    return Req(
        request.rid,
        request.input_text,
        request.input_ids,
        request.sampling_params,
        priority=request.priority,
        lora_id=request.lora_id,
        http_worker_ipc=request.http_worker_ipc,
        time_stats=request.time_stats,
    )
