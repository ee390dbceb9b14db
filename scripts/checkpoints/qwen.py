"""What the vision families of Qwen have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from checkpoints.family import IMAGE, VIDEO, Family
from checkpoints.spec import CheckpointSpec, Rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"

SPECIAL_TOKENS = (
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_PAD,
    VIDEO_PAD,
)


class QwenVision(Family):
    """A Qwen that sees: patches merged two by two, two frames of a video at a time."""

    special_tokens: ClassVar[tuple[str, ...]] = SPECIAL_TOKENS
    marks = {
        IMAGE: VISION_START + IMAGE_PAD + VISION_END,
        VIDEO: VISION_START + VIDEO_PAD + VISION_END,
    }
    patch_size = 14
    # Of the processors' files.
    processor = "Qwen2_5_VLProcessor"
    video_processor = "Qwen2VLVideoProcessor"
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    # Frames of a video are sampled by their timestamps, or taken as they come.
    samples_frames = False

    def token_ids(self, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        """The part of the configuration that names tokens."""
        ids = tokenizer.convert_tokens_to_ids
        return {
            "image_token_id": ids(IMAGE_PAD),
            "video_token_id": ids(VIDEO_PAD),
            "vision_start_token_id": ids(VISION_START),
            "vision_end_token_id": ids(VISION_END),
            "tie_word_embeddings": False,
        }

    def vision_config(self, spec: CheckpointSpec) -> dict[str, Any]:
        """What all their towers are configured with."""
        tower = spec.vision
        assert tower is not None
        return {
            "depth": tower.depth,
            "hidden_size": tower.hidden_size,
            "intermediate_size": tower.intermediate_size,
            "num_heads": tower.num_heads,
            "out_hidden_size": spec.text.hidden_size,
            "patch_size": self.patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """The preprocessing files, under the names that Qwen's repositories use."""
        unit = 2 * self.patch_size
        common = {
            "processor_class": self.processor,
            # From one embedding's worth, so that the smallest image is not enlarged, to 1280
            # embeddings: 1080p shrinks to half its pixels, which bounds its cost.
            "size": {"shortest_edge": unit**2, "longest_edge": 1280 * unit**2},
            "patch_size": self.patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "do_convert_rgb": True,
        }
        image = common | {"image_processor_type": "Qwen2VLImageProcessor"}
        video = common | {
            "video_processor_type": self.video_processor,
            "do_sample_frames": self.samples_frames,
            "min_frames": 4,
            "max_frames": 64,
        }
        if self.samples_frames:
            video["fps"] = 2
        write_json(folder / "preprocessor_config.json", image)
        write_json(folder / "video_preprocessor_config.json", video)


class Qwen3Vision(QwenVision):
    """From Qwen3-VL on."""

    patch_size = 16
    processor = "Qwen3VLProcessor"
    video_processor = "Qwen3VLVideoProcessor"
    mean = std = (0.5, 0.5, 0.5)
    samples_frames = True

    def vision_config(self, spec: CheckpointSpec) -> dict[str, Any]:
        """With the blocks whose features go to the language model's first layers."""
        assert spec.vision is not None
        return super().vision_config(spec) | {
            "deepstack_visual_indexes": list(spec.vision.taps),
            "num_position_embeddings": 2304,
        }


class Qwen35Vision(Qwen3Vision):
    """The two Qwen3.5, whose tower gives no features to the language model's layers."""

    norms_add_one = True
    # The first of the Triton kernels of its linear attention.
    stopped = (
        "fused_qkvzba_split_reshape_cat_contiguous_kernel[grid]",
        "RuntimeError: 0 active drivers ([]). There should only be one.",
    )
    rules = (
        # The one norm of a linear attention layer scales by its weight.
        Rule(r"linear_attn\.norm\.weight", deviation=0.1, offset=1.0),
        # How fast its states fade, and the steps that fading is measured in.
        Rule(r"\.A_log$", deviation=0.3),
        Rule(r"\.dt_bias$", deviation=0.3, offset=-2.0),
    )

    def linear_attention(self, spec: CheckpointSpec) -> dict[str, Any]:
        """How its language model differs from Qwen3-VL's."""
        return {
            "head_dim": spec.text.head_dim,
            "rope_parameters": rope(spec, interleaved=True) | {"rope_theta": 1e7},
            # Both say the same: SGLang reads the former, `transformers` the latter.
            "full_attention_interval": 4,
            "layer_types": [
                "full_attention" if layer % 4 == 3 else "linear_attention"
                for layer in range(spec.text.num_layers)
            ],
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "partial_rotary_factor": 1.0,
        }


def experts(spec: CheckpointSpec) -> dict[str, Any]:
    """Four experts, of which two are asked for each token; none of their matrices is square,
    so that one turned round is seen."""
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * spec.text.intermediate_size // 8,
        "norm_topk_prob": True,
    }


def rope(spec: CheckpointSpec, *, interleaved: bool = False) -> dict[str, Any]:
    """Rotary frequencies given to time, height and width; they sum to head_dim / 2."""
    half = spec.text.head_dim // 2
    side = half // 3 if interleaved else 3 * half // 8
    sections = {"rope_type": "default", "mrope_section": [half - 2 * side, side, side]}
    return sections | ({"mrope_interleaved": True} if interleaved else {"type": "mrope"})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a checkpoint's small files."""
    path.write_text(json.dumps(content, indent=2) + "\n")
