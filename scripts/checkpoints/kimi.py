"""What the two Kimi have in common: the tower MoonViT and DeepSeek's language model.

The weights are those of the Kimi-K2.5 of `transformers`, whose tower is Kimi-VL's with a
time in its positions. The processors of both are published with their weights only, so a
checkpoint carries ones that were written for it (`remote/processing_kimi.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from checkpoints.family import IMAGE, Family, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, Rule

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_START, _CONTENT, _PAD, _END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
PROCESSORS = Path(__file__).parent / "remote" / "processing_kimi.py"
# Positions on a side of the tower's table of them.
_SIDE = 64
_NAMES = {
    "model.multi_modal_projector.": "mm_projector.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


class Kimi(Family):
    """A Kimi that sees."""

    special_tokens = (_START, _CONTENT, _PAD, _END)
    marks = {IMAGE: f"{_START}image{_CONTENT}{_PAD}{_END}"}
    flags = "--trust-remote-code"
    carried = (PROCESSORS,)
    rules = (
        Rule(r"position_embeddings", deviation=0.5),
        Rule(r"mlp\.gate\.weight"),
        Rule(r"e_score_correction_bias", deviation=0.1),
    )
    # As `write_image_processor` is told.
    grids: ClassVar[str]

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import Kimi_K25Config

        assert spec.vision is not None
        return Kimi_K25Config(
            vision_config={
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
                "pos_emb_height": _SIDE,
                "pos_emb_width": _SIDE,
            },
            text_config=_text(spec, tokenizer) | {"model_type": "deepseek_v3"},
            projection_hidden_size=spec.vision.hidden_size,
            image_token_id=tokenizer.convert_tokens_to_ids(_PAD),
            tie_word_embeddings=False,
        )

    def published(self, name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
        """What `transformers` 5 means for the tower it does to the language model, too."""
        name = name.replace("self_wqkv.", "self_attn.q_proj.")
        if name.startswith("language_model."):
            name = name.replace(".blocks.", ".layers.")
        for wrong, right in _NAMES.items():
            name = name.replace(wrong, right)
        return name, weight

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """Beside the processors the configuration, in the form that the family has."""
        assert spec.vision is not None
        write_image_processor(folder, self.grids)
        published = {
            "model_type": self.name,
            "architectures": [self.architecture],
            "media_placeholder_token_id": tokenizer.convert_tokens_to_ids(_PAD),
            "pad_token_id": tokenizer.pad_token_id,
            "text_config": _text(spec, tokenizer) | {"architectures": ["DeepseekV3ForCausalLM"]},
            "vision_config": {
                "num_hidden_layers": spec.vision.depth,
                "hidden_size": spec.vision.hidden_size,
                "intermediate_size": spec.vision.intermediate_size,
                "num_attention_heads": spec.vision.num_heads,
                "patch_size": 14,
                "init_pos_emb_height": _SIDE,
                "init_pos_emb_width": _SIDE,
                "merge_kernel_size": [2, 2],
                # Kimi-K2.5's projector asks for the tower's width under this name.
                "vt_hidden_size": spec.vision.hidden_size,
                "text_hidden_size": spec.text.hidden_size,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        write_json(folder / "config.json", published)


def write_image_processor(folder: Path, grids: str) -> None:
    """What leads to the processors that a checkpoint carries.

    Args:
        grids: what its image processor calls the sizes of pictures.
    """
    code = PROCESSORS.stem
    image = {
        "image_processor_type": "KimiImageProcessor",
        "processor_class": "KimiProcessor",
        "auto_map": {
            "AutoProcessor": f"{code}.KimiProcessor",
            "AutoImageProcessor": f"{code}.KimiImageProcessor",
        },
        "grids": grids,
    }
    write_json(folder / "preprocessor_config.json", image)


def _text(spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """DeepSeek's, with latent attention, and experts from its second layer on."""
    return text_config(spec, tokenizer) | {
        "q_lora_rank": None,
        # Wider than a head, so that latents are not taken for keys.
        "kv_lora_rank": 96,
        "qk_nope_head_dim": spec.text.head_dim,
        "qk_rope_head_dim": spec.text.head_dim // 2,
        "v_head_dim": spec.text.head_dim,
        "num_key_value_heads": spec.text.num_heads,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 3 * spec.text.intermediate_size // 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "rope_theta": 1e4,
        # SGLang's DeepSeek has no other positions on a CPU.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": spec.text.max_position_embeddings // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    }
