"""Mistral Small 3: Pixtral's tower, whose pictures stand row by row in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.family import IMAGE, Family, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_PAD, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_LONGEST = 448


class Mistral3(Family):
    name = "mistral3"
    title = "Mistral Small 3"
    architecture = "Mistral3ForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-mistral3",
            TextSpec(2, 128, 256, 2, 2),
            VisionSpec(4, 64, 128, 2),
            seed=1,
            shard_mb=2,
        ),
    )
    special_tokens = (_PAD, _BREAK, _END)
    marks = {IMAGE: _PAD}

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Mistral3Config

        assert spec.vision is not None
        return Mistral3Config(
            vision_config={
                "model_type": "pixtral",
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
                "image_size": _LONGEST,
                "patch_size": 14,
            },
            text_config=text_config(spec, tokenizer)
            | {
                "model_type": "mistral",
                "architectures": ["MistralForCausalLM"],
                "head_dim": spec.text.head_dim,
                "sliding_window": None,
                "tie_word_embeddings": False,
            },
            image_token_index=tokenizer.convert_tokens_to_ids(_PAD),
            spatial_merge_size=2,
            multimodal_projector_bias=True,
            tie_word_embeddings=False,
        )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        image = {
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "size": {"longest_edge": _LONGEST},
            "patch_size": {"height": 14, "width": 14},
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "do_convert_rgb": True,
        }
        write_json(folder / "preprocessor_config.json", image)
        processor = {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": _PAD,
            "image_break_token": _BREAK,
            "image_end_token": _END,
        }
        write_json(folder / "processor_config.json", processor)


FAMILY = Mistral3()
