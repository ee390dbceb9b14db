"""Qwen3-VL: features of three vision blocks go to the language model's first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import Qwen3Vision, rope
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen3VL(Qwen3Vision):
    name = "qwen3_vl"
    title = "Qwen3-VL"
    architecture = "Qwen3VLForConditionalGeneration"
    # As Qwen2.5-VL's.
    specs = (
        CheckpointSpec(
            "tiny-qwen3-vl",
            TextSpec(3, 128, 256, 4, 2),
            VisionSpec(4, 64, 128, 2, taps=(0, 2)),
            seed=5,
        ),
        CheckpointSpec(
            "tiny-qwen3-vl-fp8",
            TextSpec(3, 128, 256, 4, 2),
            VisionSpec(4, 64, 128, 2, taps=(0, 2)),
            seed=5,
            shard_mb=1,
            fp8=True,
        ),
        CheckpointSpec(
            "bench-qwen3-vl",
            TextSpec(3, 256, 512, 4, 2),
            VisionSpec(8, 320, 1280, 4, taps=(1, 3, 5)),
            seed=8,
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen3VLConfig

        return Qwen3VLConfig(
            vision_config=self.vision_config(spec),
            text_config=text_config(spec, tokenizer)
            | {
                "head_dim": spec.text.head_dim,
                "rope_scaling": rope(spec, interleaved=True),
                "rope_theta": 5e6,
            },
            **self.token_ids(tokenizer),
        )


FAMILY = Qwen3VL()
