"""Muse-Spark: pictures, videos and sounds, attention in windows and in full by turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from checkpoints.family import AUDIO, IMAGE, VIDEO, text_config
from checkpoints.spec import CheckpointSpec
from checkpoints.unweighted import Unweighted, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class MuseSpark(Unweighted):
    name = "muse_spark"
    title = "Muse-Spark"
    architecture = "MuseSparkForConditionalGeneration"
    specs = tiny("tiny-muse-spark")
    special_tokens = (
        *("<|image_start|>", "<|patch|>", "<|image_end|>", "<|video|>", "<|audio|>"),
        *("<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>"),
        *("<|soft_audio_start|>", "<|soft_audio_end|>"),
    )
    marks = {IMAGE: "<image>", VIDEO: "<video>", AUDIO: "<audio>"}
    stopped = (
        "torch.cuda.Stream()",
        "torch.AcceleratorError: CUDA error: CUDA driver version is insufficient for CUDA runtime "
        "version",
    )

    def settings(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        assert spec.vision is not None
        width = spec.text.hidden_size
        text = {
            "head_dim": spec.text.head_dim,
            "moe_hidden_size": width,
            "moe_intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse"] * 2,
        }
        return {
            "text_config": text_config(spec, tokenizer) | text,
            "vision_config": {
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
            },
            "audio_config": {
                "hidden_sizes": [16, 16, 32, 32],
                "depths": [1, 1, 1, 1],
                "out_hidden_size": width,
            },
        }


FAMILY = MuseSpark()
