"""Parts of prompts as SGLang's requests: which prompts may be prefilled in parts, and how a part
is written.

Leans on the fields of `managers.io_struct.TokenizedGenerateReqInput`; on
`sampling.sampling_params.SamplingParams`, of which no tokens may be asked; on a fake bootstrap
(`disaggregation.utils.FAKE_BOOTSTRAP_HOST`), by which a prefill server sends no KV; and on the
scheduler's `tree_cache`, `is_generation`, `enable_priority_preemption` and `page_size`.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_epd.config import Settings
from sglang_epd.language.early import Early, Prompt
from sglang_epd.language.parts import Parts
from sglang_epd.modality import MODALITIES
from sglang_epd.seams.prefix import RadixTree, SchedulerQueue
from sglang_epd.seams.receiving import Ranks
from sglang_epd.tally import Tally
from sglang_epd.transfer.control import Claims
from sglang_epd.wire.messages import Expect

# What a request asks of its whole prompt, or that a prefix cannot stand for; and an adapter,
# which is in use only as long as its request is known to the tokenizer process.
_WHOLE_PROMPT = (
    "lora_id",
    "session_params",
    "session_id",
    "input_embeds",
    "token_type_ids",
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
)


def parts(scheduler: Any, ranks: Ranks) -> Parts | None:
    """The parts on this rank; None where prompts are never prefilled in parts."""
    from sglang.srt.runtime_context import (
        get_disagg,
        get_memory,
        get_observability,
        get_parallel,
        get_schedule,
    )

    asked, tree = Settings.from_env().prefill_early, scheduler.tree_cache
    parallel = get_parallel()
    staged = parallel.pp_size > 1
    decodes = get_disagg().disaggregation_mode != "prefill"
    if (
        # Later stages may be on a host that is set otherwise, and do as the first one does.
        (asked == "off" and parallel.pp_rank == 0)
        or not scheduler.is_generation
        or ranks.elsewhere
        # What a stage hears goes to all of its ranks, and each replica has requests of its own.
        # And all replicas step together: what the others decode is not seen here.
        or (parallel.attn_dp_enabled and (staged or (asked == "auto" and decodes)))
        or get_memory().disable_radix_cache
        or tree.disable
        or tree.supports_mamba()
        or tree.supports_swa()
        # A part could have another request refused.
        or get_schedule().max_queued_requests is not None
        # A decode server receives no KV of a part, and would keep what lies there in its tree.
        or get_disagg().disaggregation_mode == "decode"
        or get_disagg().enable_pd_role_switch
        # With PD multiplexing a part that runs is in a batch where none is looked for.
        or get_disagg().enable_pdmux
        # A part would throw others out of their batch.
        or scheduler.enable_priority_preemption
    ):
        return None
    tally = Tally()
    if ranks.leads and get_observability().enable_metrics:
        from sglang_epd.observability.language import EarlyMetrics
        from sglang_epd.observability.metrics import PrometheusTally

        tally = PrometheusTally(EarlyMetrics())
    queue, page = SchedulerQueue(scheduler), scheduler.page_size
    return Parts(
        RadixTree(tree),
        queue,
        page,
        tally,
        always=asked == "on",
        stages=staged and parallel.pp_rank == 0,
    )


def leading(parts: Parts, claims: Claims, processor: Any, secret: bytes) -> Early:
    """What begins parts, on the rank that leads.

    Args:
        processor: lays out the model's prompts.
    """
    from sglang.srt.runtime_context import get_disagg

    apart = get_disagg().disaggregation_mode == "prefill"
    return Early(claims, parts, read=reader(processor, apart=apart), make=make, secret=secret)


class Waking:
    """A scheduler's poller that wakes it when something is due, too.

    Args:
        due_s: seconds until then.
    """

    def __init__(self, poller: Any, due_s: Callable[[], float]) -> None:
        self._poller = poller
        self._due_s = due_s

    def poll(self, timeout_ms: float) -> Any:
        return self._poller.poll(math.ceil(min(timeout_ms, self._due_s() * 1e3)))


def reader(processor: Any, *, apart: bool) -> Callable[[Any, Expect], Prompt | None]:
    """What finds the items of a request in its prompt.

    Args:
        processor: lays out the model's prompts.
        apart: whether KV goes to a decode server, by a room that the request names; one without
            is refused when its items have landed.
    """
    tokens = [getattr(processor, row.placeholder, None) for row in MODALITIES.values()]

    def read(request: Any, expect: Expect) -> Prompt | None:
        if request.input_ids is None or any(getattr(request, name, 0) for name in _WHOLE_PROMPT):
            return None
        if apart and request.bootstrap_room is None:
            return None
        if request.return_logprob and request.logprob_start_len >= 0:
            return None
        ids = np.array(request.input_ids)
        # Items are numbered by modality, and by place in each.
        found = [int(place) for token in tokens for place in np.flatnonzero(ids == token)]
        if len(found) != expect.items:
            return None
        items = sorted(range(len(found)), key=found.__getitem__)
        return Prompt(array("q", request.input_ids), tuple(sorted(found)), tuple(items))

    return read


def make(request: Any, rid: str, ids: array[int]) -> Any:
    """A request that has the beginning of another's prompt prefilled, and generates nothing."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.sampling.sampling_params import SamplingParams

    part = copy.copy(request)
    part.rid, part.input_ids = rid, ids
    part.input_text, part.mm_inputs = "", None
    part.sampling_params = SamplingParams(max_new_tokens=0, temperature=0.0)
    part.sampling_params.normalize(None)
    part.stream, part.return_logprob, part.logprob_start_len = False, False, -1
    part.top_logprobs_num, part.token_ids_logprob = 0, None
    part.return_sampling_mask, part.require_reasoning = False, False
    part.custom_logit_processor, part.time_stats = None, None
    if part.bootstrap_room is not None:
        part.bootstrap_host, part.bootstrap_room = FAKE_BOOTSTRAP_HOST, 0
    return part
