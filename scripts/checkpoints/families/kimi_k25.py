"""Kimi-K2.5."""

from __future__ import annotations

from checkpoints.kimi import Kimi
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec


class KimiK25(Kimi):
    name = "kimi_k25"
    title = "Kimi-K2.5"
    architecture = "KimiK25ForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-kimi-k25", TextSpec(2, 128, 256, 2, 2), VisionSpec(3, 64, 128, 2), seed=1
        ),
    )
    grids = "grid_thws"


FAMILY = KimiK25()
