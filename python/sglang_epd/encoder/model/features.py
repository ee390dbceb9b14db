"""What a processor made of an item, from the thread that prepared it to the one that runs it.

A processor may leave tensors on the device: there it made them on the stream of its own
thread, and a pass that reads them runs on another. What it leaves in host memory is pinned:
from there the device copies it six times as fast, and beside the pass before
(benchmark/results/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from sglang_epd.device import Device
from sglang_epd.encoder.tower import Prepared

# Torch keeps what was pinned, for the next items: a long video's patches stay as they are.
PINNED_BYTES = 128 << 20


def mark(prepared: Prepared, device: Device) -> Prepared:
    """Pinned, with the event after which all of it is there; call it in the thread that
    prepared it.

    Args:
        prepared: its content is (modality, SGLang's `MultimodalDataItem`s).
    """
    for item in prepared.content[1] if device.queues else ():
        item.feature = _pinned(item.feature, device)
    return replace(prepared, content=(*prepared.content, device.current().record_event()))


def take(batch: Sequence[Prepared], device: Device) -> list[Any]:
    """The items of a batch, for work that is queued on the current stream from now on."""
    stream = device.current()
    items = []
    for prepared in batch:
        _, made, event = prepared.content
        stream.wait_event(event)
        items += made
    for tensor in tree_leaves([[item.feature, item.model_specific_data] for item in items]):
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            device.hold(tensor, stream)
    return items


def moved(feature: Any, device: str) -> Any:
    """A feature there: a tensor, or a list of tensors as some families have."""
    return tree_map(lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, feature)


def _pinned(feature: Any, device: Device) -> Any:
    """The same values in pinned memory, unless it is not in host memory, or too large."""
    if not isinstance(feature, torch.Tensor) or feature.device.type != "cpu":
        return feature
    if not 0 < feature.nbytes <= PINNED_BYTES:
        return feature
    held = device.pinned(feature.nbytes).view(feature.dtype).view(feature.shape)
    return held.copy_(feature)
