"""GLM-4.1V: rotary positions in three dimensions, pictures between marks of the template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.family import IMAGE, VIDEO, Family, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_START, _PAD, _END = "<|begin_of_image|>", "<|image|>", "<|end_of_image|>"
_VIDEO_START, _VIDEO, _VIDEO_END = "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"
_UNIT = 28


class Glm4v(Family):
    name = "glm4v"
    title = "GLM-4.1V"
    architecture = "Glm4vForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-glm4v",
            TextSpec(2, 128, 256, 2, 2),
            VisionSpec(4, 64, 128, 2),
            seed=1,
        ),
    )
    special_tokens = (_START, _PAD, _END, _VIDEO_START, _VIDEO, _VIDEO_END)
    marks = {IMAGE: _START + _PAD + _END, VIDEO: _VIDEO_START + _VIDEO + _VIDEO_END}

    @staticmethod
    def token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
        """The part of the configuration that names tokens."""
        ids = tokenizer.convert_tokens_to_ids
        return {
            "image_token_id": ids(_PAD),
            "image_start_token_id": ids(_START),
            "image_end_token_id": ids(_END),
            "video_token_id": ids(_VIDEO),
            "video_start_token_id": ids(_VIDEO_START),
            "video_end_token_id": ids(_VIDEO_END),
        }

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Glm4vConfig

        assert spec.vision is not None
        half = spec.text.head_dim // 4
        return Glm4vConfig(
            vision_config={
                "depth": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_heads": spec.vision.num_heads,
                "out_hidden_size": spec.text.hidden_size,
                "image_size": 336,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            text_config=text_config(spec, tokenizer)
            | {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                },
                "tie_word_embeddings": False,
            },
            **self.token_ids(tokenizer),
            tie_word_embeddings=False,
        )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        common = {
            "processor_class": "Glm4vProcessor",
            # Two frames of the size at least, as GLM counts.
            "size": {"shortest_edge": 2 * _UNIT**2, "longest_edge": 2 * 1280 * _UNIT**2},
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "do_convert_rgb": True,
        }
        image = common | {"image_processor_type": "Glm4vImageProcessor"}
        write_json(folder / "preprocessor_config.json", image)
        video = common | {"video_processor_type": "Glm4vVideoProcessor"}
        write_json(folder / "video_preprocessor_config.json", video)


FAMILY = Glm4v()
