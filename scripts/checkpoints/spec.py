"""What a checkpoint is: frozen descriptions that its family turns into files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionSpec:
    """The vision transformer. `taps` are the blocks that a family treats apart: those with
    full attention of Qwen2.5-VL, the deepstack blocks of Qwen3-VL."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class AudioSpec:
    """The audio encoder."""

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
    """One checkpoint. Two equal specs of a family give bit-identical weights (same torch).

    `shard_mb` is the most that a file of weights holds; without it there is one file. With
    `fp8` the language model is quantised.
    """

    name: str
    text: TextSpec
    vision: VisionSpec | None = None
    audio: AudioSpec | None = None
    seed: int = 0
    shard_mb: int | None = None
    fp8: bool = False


@dataclass(frozen=True)
class Rule:
    """How the parameters that `pattern` is found in are drawn: `offset` plus standard
    normal numbers times `deviation`, or times `gain` over the root of a layer's inputs."""

    pattern: str
    gain: float = 1.0
    deviation: float | None = None
    offset: float = 0.0
