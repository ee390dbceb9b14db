"""What a processor made of an item, from the thread that prepared it to the one that runs it.

A processor may leave tensors on the device: there it made them on the stream of its own
thread, and a pass that reads them runs on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sglang_epd.device import Device
from sglang_epd.encoder.tower import Prepared


def mark(prepared: Prepared, device: Device) -> Prepared:
    """With the event after which all of it is there; call it in the thread that prepared it.

    Args:
        prepared: its content is (modality, SGLang's `MultimodalDataItem`s).
    """
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
