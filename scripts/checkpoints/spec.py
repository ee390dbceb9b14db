"""What each checkpoint is: a frozen description that the builder turns into files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["qwen2_5_vl", "qwen3_vl", "qwen2_audio"]


@dataclass(frozen=True)
class VisionSpec:
    """The vision transformer. `taps` are the full-attention blocks of Qwen2.5-VL
    (the others attend inside windows) or the deepstack blocks of Qwen3-VL."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    taps: tuple[int, ...]


@dataclass(frozen=True)
class AudioSpec:
    """The audio encoder of Qwen2-Audio, which hears 30 s at a time."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int


@dataclass(frozen=True)
class TextSpec:
    """The language model; `head_dim` is 64 so that GPU attention kernels take it too."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    max_position_embeddings: int = 32768


@dataclass(frozen=True)
class CheckpointSpec:
    """One checkpoint. Two equal specs give bit-identical weights (same torch)."""

    name: str
    family: Family
    tower: VisionSpec | AudioSpec
    text: TextSpec
    seed: int

    @property
    def patch_size(self) -> int:
        return 14 if self.family == "qwen2_5_vl" else 16

    @property
    def min_pixels(self) -> int:
        """One embedding's worth: an image of 28x28 (32x32) pixels is not enlarged."""
        return (2 * self.patch_size) ** 2

    @property
    def max_pixels(self) -> int:
        """1280 embeddings: 1080p shrinks to half its pixels, which bounds its cost."""
        return 1280 * (2 * self.patch_size) ** 2

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Rotary frequencies given to time, height and width; they sum to head_dim / 2."""
        half = self.text.head_dim // 2
        side = 3 * half // 8 if self.family == "qwen2_5_vl" else half // 3
        return (half - 2 * side, side, side)


# `tiny`: both forwards take milliseconds.
# `bench`: one 448x448 image costs some 0.2 s of one core in the vision transformer,
# and a prefill of a thousand tokens less than that.
# Seeds were tried in order until `make_checkpoint.py NAME --check` passed with room.
SPECS: dict[str, CheckpointSpec] = {
    spec.name: spec
    for spec in (
        CheckpointSpec(
            "tiny-qwen2_5-vl",
            "qwen2_5_vl",
            VisionSpec(4, 64, 128, 2, taps=(1, 3)),
            TextSpec(2, 128, 256, 2, 2),
            seed=6,
        ),
        CheckpointSpec(
            "tiny-qwen3-vl",
            "qwen3_vl",
            VisionSpec(4, 64, 128, 2, taps=(0, 2)),
            TextSpec(3, 128, 256, 4, 2),
            seed=5,
        ),
        CheckpointSpec(
            "bench-qwen2_5-vl",
            "qwen2_5_vl",
            VisionSpec(8, 320, 768, 4, taps=(3, 7)),
            TextSpec(3, 256, 512, 4, 2),
            seed=4,
        ),
        CheckpointSpec(
            "bench-qwen3-vl",
            "qwen3_vl",
            VisionSpec(8, 320, 1280, 4, taps=(1, 3, 5)),
            TextSpec(3, 256, 512, 4, 2),
            seed=8,
        ),
        CheckpointSpec(
            "tiny-qwen2-audio",
            "qwen2_audio",
            AudioSpec(2, 64, 128, 2),
            TextSpec(2, 128, 256, 2, 2),
            seed=1,
        ),
    )
}
