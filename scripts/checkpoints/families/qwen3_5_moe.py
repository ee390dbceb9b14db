"""Qwen3.5 with experts in its language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import Qwen35Vision, experts
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen35Moe(Qwen35Vision):
    name = "qwen3_5_moe"
    title = "Qwen3.5-MoE"
    architecture = "Qwen3_5MoeForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-qwen3_5-moe", TextSpec(4, 128, 256, 4, 2), VisionSpec(4, 64, 128, 2), seed=1
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen3_5MoeConfig

        return Qwen3_5MoeConfig(
            vision_config=self.vision_config(spec),
            text_config=text_config(spec, tokenizer)
            | self.linear_attention(spec)
            | experts(spec)
            | {"shared_expert_intermediate_size": 64},
            **self.token_ids(tokenizer),
        )


FAMILY = Qwen35Moe()
