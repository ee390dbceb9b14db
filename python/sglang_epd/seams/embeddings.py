"""Requests for an embedding of a prompt with media: `/v1/embeddings`, `/encode`, `Engine.encode`.

SGLang's EPD knows generation only: its `EmbeddingReqInput` and `TokenizedEmbeddingReqInput` have
no field for a request that waits for encoders, and its tokenizer manager fails as it reads one.
Here the former gets it, and the latter carries its manifest as `language.manifest` says.

Leans on `managers.tokenizer_manager.TokenizerManager`: `generate_request` calls
`_handle_epd_disaggregation_encode_request(obj)`, which passes such a request over;
`_tokenize_one_request` reads the field of each prompt. In the scheduler on
`managers.schedule_batch.Req`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def give_field() -> None:
    """In a tokenizer process: requests of this kind may wait for encoders. SGLang reads this of a
    generation request, and of each of the prompts of a batch; a user cannot write it here, where
    it is none of the dataclass's."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    EmbeddingReqInput.need_wait_for_mm_inputs = None


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
