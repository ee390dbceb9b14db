"""Requests on their way to the next pipeline stage, without their embeddings, and what the first
stage has heard of parts of prompts.

Leans on `managers.scheduler_pp_mixin.SchedulerPPMixin._pp_send_pyobj_to_next_stage(data)`, by
which a stage pickles the requests that it has taken in to the next one, and on
`managers.mm_utils.prepare_mm_inputs`, which looks at embeddings in the first stage only. The
others need an item's place in the prompt, its identity and its positions. On
`managers.scheduler.Scheduler.process_input_requests(recv_reqs)`, which each stage calls with a
tick's requests, the very list that it sends to the next one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Heard:
    """What the first stage has heard of parts of prompts in a tick, ahead of its requests.

    Attributes:
        calls: methods of `Parts`, each with its arguments.
    """

    calls: list[tuple[Any, ...]]


def hear(scheduler: Any, recv_reqs: list[Any]) -> list[Any]:
    """Before `process_input_requests`: the requests, without what is to be heard."""
    requests = []
    for one in recv_reqs:
        if isinstance(one, Heard):
            scheduler.mm_receiver.hear(one)
        else:
            requests.append(one)
    return requests


def send(original: Any, scheduler: Any, data: list[Any], *args: Any, **options: Any) -> Any:
    """Around `_pp_send_pyobj_to_next_stage`; `data` may be ids of requests, too."""
    from sglang.srt.runtime_context import get_disagg

    if get_disagg().language_only:
        data = [_without_rows(one) for one in data]
    return original(scheduler, data, *args, **options)


def _without_rows(request: Any) -> Any:
    """The request, or a copy whose items have embeddings without rows: the request itself
    shares its items with the one that this stage runs."""
    batch = getattr(request, "batch", None)
    if batch:
        sent = copy.copy(request)
        sent.batch = [_without_rows(one) for one in batch]
        return sent
    items = getattr(getattr(request, "mm_inputs", None), "mm_items", None) or ()
    if not items:
        return request
    sent = copy.copy(request)
    sent.mm_inputs = copy.copy(request.mm_inputs)
    sent.mm_inputs.mm_items = [_bare(item) for item in items]
    return sent


def _bare(item: Any) -> Any:
    embeddings = item.precomputed_embeddings
    # Without an identity one would be made of the rows.
    if not isinstance(embeddings, torch.Tensor) or item.pad_value is None:
        return item
    bare = copy.copy(item)
    # A copy: a view is pickled with all that it is a view of.
    bare.precomputed_embeddings = embeddings[:0].clone()
    return bare
