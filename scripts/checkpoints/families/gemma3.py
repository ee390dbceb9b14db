"""Gemma 3: every picture becomes equally many embeddings, and stands between blank lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.family import IMAGE, Family, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, TextSpec, VisionSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_START, _PAD, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_SIDE = 280
# Of 20 by 20 patches, pooled two by two.
_EMBEDDINGS = 100


class Gemma3(Family):
    name = "gemma3"
    title = "Gemma 3"
    architecture = "Gemma3ForConditionalGeneration"
    specs = (
        CheckpointSpec(
            "tiny-gemma3",
            TextSpec(2, 128, 256, 2, 2),
            VisionSpec(4, 64, 128, 2),
            seed=2,
        ),
    )
    special_tokens = (_START, _PAD, _END)
    named_tokens = {"boi_token": _START, "image_token": _PAD, "eoi_token": _END}
    marks = {IMAGE: _START}
    norms_add_one = True
    embedding_multiplier = 128**0.5
    # SGLang serves it without its tower otherwise.
    flags = "--enable-multimodal"

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Gemma3Config

        assert spec.vision is not None
        ids = tokenizer.convert_tokens_to_ids
        return Gemma3Config(
            vision_config={
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
                "image_size": _SIDE,
                "patch_size": 14,
                "vision_use_head": False,
            },
            text_config=text_config(spec, tokenizer)
            | {
                "head_dim": spec.text.head_dim,
                "query_pre_attn_scalar": spec.text.head_dim,
                "layer_types": ["full_attention"] * spec.text.num_layers,
                "tie_word_embeddings": False,
            },
            mm_tokens_per_image=_EMBEDDINGS,
            boi_token_index=ids(_START),
            image_token_index=ids(_PAD),
            eoi_token_index=ids(_END),
            tie_word_embeddings=False,
        )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        image = {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": _SIDE, "width": _SIDE},
            "image_seq_length": _EMBEDDINGS,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_convert_rgb": True,
        }
        write_json(folder / "preprocessor_config.json", image)
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": _EMBEDDINGS}
        write_json(folder / "processor_config.json", processor)

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What `transformers` 5 writes has one level less."""
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1), weight


FAMILY = Gemma3()
