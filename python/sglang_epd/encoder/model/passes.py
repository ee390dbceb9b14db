"""A long video in several passes of the tower, each over some of its steps of time.

A tower's memory grows with the patches of a pass, and the embedding of a video's beginning is
there before its end has been run. That gives what one pass gives only where no patch attends to
one of another step: SGLang's towers of Qwen2-VL and Qwen3-VL. Qwen2.5-VL's has blocks in which a
video's patches attend to all of it, whatever its windows are.

Leans on `models.qwen2_vl.Qwen2VisionTransformer` and `models.qwen3_vl.Qwen3VLMoeVisionModel`
bounding attention by the steps of `video_grid_thw`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import msgspec
import torch

from sglang_epd.encoder.tower import Prepared
from sglang_epd.modality import VIDEO
from sglang_epd.wire.messages import TensorSpec

_WITHIN_STEPS = (
    "sglang.srt.models.qwen2_vl.Qwen2VisionTransformer",
    "sglang.srt.models.qwen3_vl.Qwen3VLMoeVisionModel",
)


def within_steps(model: Any) -> bool:
    """Whether the patches of a video attend to those of their own step alone."""
    tower = type(getattr(model, "visual", None))
    return f"{tower.__module__}.{tower.__qualname__}" in _WITHIN_STEPS


def in_passes(prepared: Prepared, patches: int) -> list[Prepared]:
    """A video as one item a pass, of as few passes of whole steps as have room for it; any other
    item as it is.

    Args:
        prepared: of a tower that attends within steps.
        patches: of a pass; one step may have more.
    """
    layout = prepared.layout
    sglang_modality, items, *made = prepared.content
    apart = layout.modality != VIDEO or len(layout.grid) != 1 or len(items) != 1
    if apart or prepared.patches <= patches:
        return [prepared]
    (item,), ((steps, height, width),) = items, layout.grid
    size, rows = height * width, layout.tokens // steps
    # Of one size, so that the first has not nearly all of it.
    each = math.ceil(steps / math.ceil(steps / max(1, patches // size)))
    passes = []
    for begin in range(0, steps, each):
        end = min(begin + each, steps)
        part = copy.copy(item)
        part.feature = item.feature[begin * size : end * size]
        grid = torch.tensor([[end - begin, height, width]])
        part.model_specific_data = item.model_specific_data | {"video_grid_thw": grid}
        spec = TensorSpec(layout.embedding.dtype, ((end - begin) * rows, layout.embedding.shape[1]))
        smaller = msgspec.structs.replace(layout, embedding=spec, grid=grid.tolist())
        content = (sglang_modality, [part], *made)
        count = (end - begin) * size
        passes.append(replace(prepared, layout=smaller, patches=count, content=content))
    return passes
