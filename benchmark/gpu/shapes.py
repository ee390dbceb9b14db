"""Vision towers in the shapes of released models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A tower: its configuration, and how many pixels its pictures may have."""

    family: str
    options: dict[str, Any]
    pixels: tuple[int, int] = (65_536, 16_777_216)


SHAPES = {
    "qwen3-vl-8b": Shape(
        "qwen3_vl",
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "qwen2.5-vl-7b": Shape(
        "qwen2_5_vl",
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        (3136, 12_845_056),
    ),
    "tiny-qwen3-vl": Shape(
        "qwen3_vl",
        {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
}
