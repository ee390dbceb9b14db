"""Qwen3-VL with experts in its language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints.family import text_config
from checkpoints.qwen import Qwen3Vision, experts, rope
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


class Qwen3VLMoe(Qwen3Vision):
    name = "qwen3_vl_moe"
    title = "Qwen3-VL-MoE"
    architecture = "Qwen3VLMoeForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-qwen3-vl-moe",
            TextSpec(3, 128, 256, 4, 2),
            VisionSpec(4, 64, 128, 2, taps=(0, 1, 2)),
            seed=1,
            shard_mb=2,
        ),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Qwen3VLMoeConfig

        return Qwen3VLMoeConfig(
            vision_config=self.vision_config(spec),
            text_config=text_config(spec, tokenizer)
            | experts(spec)
            | {
                "head_dim": spec.text.head_dim,
                "rope_scaling": rope(spec, interleaved=True),
                "rope_theta": 5e6,
                "tie_word_embeddings": False,
            },
            **self.token_ids(tokenizer),
        )

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """The experts' inputs come before their outputs; `transformers` 5 turns them round as
        it reads them, and not back."""
        if ".mlp.experts." in name:
            return name, weight.transpose(1, 2).contiguous()
        return name, weight


FAMILY = Qwen3VLMoe()
