"""Qwen2.5-VL: window attention in most of its vision blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import QwenVision, rope
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen25VL(QwenVision):
    name = "qwen2_5_vl"
    title = "Qwen2.5-VL"
    architecture = "Qwen2_5_VLForConditionalGeneration"
    specs = (
        # Both forwards take milliseconds.
        CheckpointSpec(
            "tiny-qwen2_5-vl",
            TextSpec(2, 128, 256, 2, 2),
            VisionSpec(4, 64, 128, 2, taps=(1, 3)),
            seed=6,
        ),
        # One 448x448 image costs some 0.2 s of one core in the vision transformer, and a
        # prefill of a thousand tokens less than that.
        CheckpointSpec(
            "bench-qwen2_5-vl",
            TextSpec(3, 256, 512, 4, 2),
            VisionSpec(8, 320, 768, 4, taps=(3, 7)),
            seed=4,
        ),
        # As `heavy-qwen2-vl`; SGLang builds no language model for it on encoders.
        CheckpointSpec(
            "heavy-qwen2_5-vl",
            TextSpec(16, 1024, 2816, 16, 4),
            VisionSpec(8, 384, 1536, 6, taps=(3, 7)),
            seed=1,
            shard_mb=200,
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen2_5_VLConfig

        assert spec.vision is not None
        text = text_config(spec, tokenizer) | {"rope_scaling": rope(spec), "rope_theta": 1e6}
        return Qwen2_5_VLConfig(
            vision_config=self.vision_config(spec)
            | {"fullatt_block_indexes": list(spec.vision.taps)},
            text_config=text,
            **self.token_ids(tokenizer),
        )


FAMILY = Qwen25VL()
