"""Families whose checkpoint is a configuration, a tokenizer and no weights.

SGLang has these models' classes, `transformers` mostly not, and on a CPU SGLang stops before it
reads a weight: so nothing more is needed to see where.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from checkpoints.family import IMAGE, Family
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PAD = "<|image_pad|>"


class Unweighted(Family):
    """Its `specs` have the sizes of the only checkpoint, its `stopped` what stops it."""

    special_tokens: ClassVar[tuple[str, ...]] = (_PAD,)
    marks = {IMAGE: _PAD}
    # What SGLang would load where a server came that far.
    flags = "--load-format dummy"

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        """What its configuration has beside its names."""
        raise NotImplementedError

    def configuration(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast
    ) -> dict[str, Any]:
        """The whole of it."""
        names = {"model_type": self.name, "architectures": [self.architecture]}
        return names | {"torch_dtype": "float32"} | self.settings(spec, tokenizer)

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """The least that `transformers` takes for a processor."""
        image = {
            "processor_class": "Qwen2_5_VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28**2, "longest_edge": 1280 * 28**2},
        }
        write_json(folder / "preprocessor_config.json", image)
        video = {
            "processor_class": "Qwen2_5_VLProcessor",
            "video_processor_type": "Qwen2VLVideoProcessor",
        }
        write_json(folder / "video_preprocessor_config.json", video)


def tiny(name: str) -> tuple[CheckpointSpec, ...]:
    """Four layers, of which each kind that these families have is one."""
    return (CheckpointSpec(name, TextSpec(4, 128, 256, 2, 2), VisionSpec(2, 64, 128, 2)),)


def latent_attention(spec: CheckpointSpec) -> dict[str, Any]:
    """DeepSeek's attention and experts, which most of them have."""
    return {
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": spec.text.head_dim,
        "qk_rope_head_dim": spec.text.head_dim // 2,
        "v_head_dim": spec.text.head_dim,
        "moe_intermediate_size": 96,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
