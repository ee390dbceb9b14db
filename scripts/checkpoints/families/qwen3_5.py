"""Qwen3.5: linear attention in three of four layers of its language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import Qwen35Vision
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen35(Qwen35Vision):
    name = "qwen3_5"
    title = "Qwen3.5"
    architecture = "Qwen3_5ForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-qwen3_5", TextSpec(4, 128, 256, 4, 2), VisionSpec(4, 64, 128, 2), seed=1
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen3_5Config

        return Qwen3_5Config(
            vision_config=self.vision_config(spec),
            text_config=text_config(spec, tokenizer) | self.linear_attention(spec),
            **self.token_ids(tokenizer),
        )


FAMILY = Qwen35()
