"""Gives embeddings back as soon as SGLang has no more use for them.

SGLang keeps a request's `precomputed_embeddings` until it forgets the request's inputs,
and its scheduler keeps the inputs of the last prefill batch for as long as there is no
other. Where memory is short the next prefill may be waiting for just that.

Leans on `managers.schedule_batch.MultimodalInputs.release_features`, which SGLang calls
when a request has ended and none of its session follows, and on
`disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue`,
which returns the requests whose KV has been sent.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.seams.prefix import Installed


def drop(_result: None, mm_inputs: Any) -> None:
    """After `release_features`: the embeddings go with the features."""
    if Installed.gate is not None:
        for item in mm_inputs.mm_items:
            item.precomputed_embeddings = None


def release_sent(done: list[Any], _scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After `process_disagg_prefill_inflight_queue`: a request whose KV has been sent is not
    computed again."""
    for request in done if Installed.gate is not None else ():
        if request.multimodal_inputs is not None and request.session is None:
            request.multimodal_inputs.release_features()
