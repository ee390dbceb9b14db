"""Kimi-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.kimi import Kimi
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    import torch


class KimiVL(Kimi):
    name = "kimi_vl"
    title = "Kimi-VL"
    architecture = "KimiVLForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-kimi-vl", TextSpec(2, 128, 256, 2, 2), VisionSpec(3, 64, 128, 2), seed=1
        ),
    )
    grids = "image_grid_hws"

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Kimi-VL calls the projector's layers otherwise than Kimi-K2.5."""
        name, weight = super().published(name, weight)
        name = name.replace("mm_projector.proj.0", "mm_projector.linear_1")
        name = name.replace("mm_projector.proj.2", "mm_projector.linear_2")
        return name.replace("mm_projector.", "multi_modal_projector."), weight


FAMILY = KimiVL()
