"""Embeddings onto the device, as SGLang takes their rows for a forward pass.

SGLang gathers the rows of a pass on the device that they are on. Left on the host, they would
be concatenated, split into columns and copied by the scheduler's thread, while the device is
idle.

Leans on `managers.mm_schedule.get_embedding_chunk`, which says which rows of an item a pass
takes, called with the pass's stream as the current one, and on its caller
`_get_precomputed_embedding`, which brings rows without a device to that of the others; on
`mem_cache.kv_cache_configurator.mm_runtime_reservation_gb`, what is kept out of the KV pool for
multimodal data.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any

import torch

from sglang_epd.device import Device, device_of
from sglang_epd.language.uploads import Stager
from sglang_epd.transfer.arena import Arena

logger = logging.getLogger(__name__)

# Passes whose rows may be on the device: one that runs, and one that is launched meanwhile. With
# stages more are launched before the first has come through all of them.
_PASSES = 2


@functools.cache
def stager() -> Stager | None:
    """This process's; None where it does not prefill from embeddings, or on the host."""
    from sglang.srt.runtime_context import get_parallel

    device = None if get_parallel().pp_rank else _device()
    return None if device is None else Stager(device)


def _device() -> Device | None:
    """A language server's, of whatever stage; None on the host."""
    from sglang.srt.runtime_context import get_device, get_disagg

    if not get_disagg().language_only:
        return None
    device = device_of(get_device().device)
    return device if device.queues else None


def connect(arena: Arena | None) -> Stager | None:
    """The stager, if there is one, with the arena registered.

    Without an arena, on another host than the receiver's, and where the device's driver
    refuses, the scheduler's thread waits for copies.
    """
    ours = stager()
    if ours is None or arena is None:
        return ours
    begin = time.monotonic()
    try:
        ours.register(arena)
    except RuntimeError as error:
        logger.warning("Embeddings are copied from pageable memory, which takes longer: %s", error)
    else:
        mib, seconds = len(arena.data) >> 20, time.monotonic() - begin
        logger.info("Registered %d MiB for embeddings with the device in %.1f s", mib, seconds)
    return ours


def take_rows(original: Any, *args: Any, **options: Any) -> Any:
    """Around `get_embedding_chunk`."""
    rows, begin, end = original(*args, **options)
    ours = stager()
    if ours is not None and rows.is_cpu and len(rows):
        rows = ours.stage(rows)
    return rows, begin, end


def reserve(original: Any, *args: Any, **options: Any) -> float:
    """Around `mm_runtime_reservation_gb`: rows that are staged are outside the KV pool.

    On later stages too, which have none: SGLang sizes what else is kept of a request on each by
    itself, and all have to come to the same.
    """
    reserved: float = original(*args, **options)
    return reserved if _device() is None else reserved + staged_bytes() / (1 << 30)


def staged_bytes() -> int:
    """What the rows of passes in flight take at most, where every token is of a picture."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.runtime_context import get_parallel, get_schedule, get_server_args

    parallel = get_parallel()
    passes = max(_PASSES, parallel.pp_size + max(parallel.pp_async_batch_depth - 1, 0))
    schedule, model = get_schedule(), model_config_of(get_server_args())
    tokens = max(schedule.chunked_prefill_size or 0, 0) or schedule.max_prefill_tokens
    config = getattr(model.hf_config, "thinker_config", model.hf_config)
    tower = getattr(config, "vision_config", None)
    deepstack = getattr(tower, "deepstack_visual_indexes", None) or ()
    row_bytes = model.hidden_size * (1 + len(deepstack)) * torch.finfo(model.dtype).bits // 8
    return passes * tokens * row_bytes
