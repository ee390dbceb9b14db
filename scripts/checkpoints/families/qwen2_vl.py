"""Qwen2-VL: every vision block attends to a whole image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import QwenVision, rope
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen2VL(QwenVision):
    name = "qwen2_vl"
    title = "Qwen2-VL"
    architecture = "Qwen2VLForConditionalGeneration"
    processor = "Qwen2VLProcessor"
    specs = (
        CheckpointSpec(
            "tiny-qwen2-vl", TextSpec(2, 128, 256, 2, 2), VisionSpec(4, 64, 128, 2), seed=1
        ),
        # To weigh servers: a language model of ten times its tower, in several files. SGLang
        # builds it on encoders, too.
        CheckpointSpec(
            "heavy-qwen2-vl",
            TextSpec(16, 1024, 2816, 16, 4),
            VisionSpec(8, 384, 1536, 6),
            seed=1,
            shard_mb=200,
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen2VLConfig

        tower = spec.vision
        assert tower is not None
        return Qwen2VLConfig(
            # Here `hidden_size` is the language model's.
            vision_config={
                "depth": tower.depth,
                "embed_dim": tower.hidden_size,
                "mlp_ratio": tower.intermediate_size // tower.hidden_size,
                "num_heads": tower.num_heads,
                "hidden_size": spec.text.hidden_size,
                "patch_size": self.patch_size,
                # As published; SGLang reads it, `transformers` its own `in_channels`.
                "in_chans": 3,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            text_config=text_config(spec, tokenizer)
            | {"rope_scaling": rope(spec), "rope_theta": 1e6},
            **self.token_ids(tokenizer),
        )


FAMILY = Qwen2VL()
