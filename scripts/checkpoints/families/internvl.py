"""InternVL 2.5 and 3, as OpenGVLab publishes it: pictures cut into tiles, and a thumbnail.

`transformers` has a model of its own form; its weights are written under OpenGVLab's names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.family import IMAGE, VIDEO, Family, text_config
from checkpoints.qwen import write_json
from checkpoints.spec import CheckpointSpec, Rule, TextSpec, VisionSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

_START, _PAD, _END, _VIDEO = "<img>", "<IMG_CONTEXT>", "</img>", "<|video_pad|>"
# SGLang's processor makes tiles of this size, whatever the model says.
_TILE = 448
# Larger than the family's 14, so that a tile is 64 embeddings and takes a CPU milliseconds.
_PATCH = 28
_NAMES = (
    (r"^vision_tower\.", "vision_model."),
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.cls_token$", ".class_embedding"),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"\.patch_embeddings\.projection", ".patch_embedding"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_(\d)$", r"ls\1"),
    (r"attention\.projection_layer", "attn.proj"),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)


class InternVL(Family):
    name = "internvl_chat"
    title = "InternVL 3"
    architecture = "InternVLChatModel"
    specs = (
        CheckpointSpec(
            "tiny-internvl",
            TextSpec(2, 128, 256, 2, 2),
            VisionSpec(3, 64, 128, 2),
            seed=1,
        ),
    )
    special_tokens = (_START, _PAD, _END, _VIDEO)
    marks = {IMAGE: "<image>", VIDEO: "<video>"}
    without = {"image of a tool": "SGLang's chat template of this family knows no tools"}
    rules = (
        Rule(r"lambda_\d$", deviation=0.1, offset=1.0),
        Rule(r"cls_token|position_embeddings", deviation=0.5),
    )

    def config(self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        from transformers import InternVLConfig

        assert spec.vision is not None
        return InternVLConfig(
            vision_config=_tower(spec.vision) | {"attention_bias": True},
            text_config=text_config(spec, tokenizer)
            | {"model_type": "qwen2", "tie_word_embeddings": False},
            image_token_id=tokenizer.convert_tokens_to_ids(_PAD),
            image_seq_length=(_TILE // _PATCH // 2) ** 2,
            tie_word_embeddings=False,
        )

    def write_processors(
        self, spec: CheckpointSpec, tokenizer: PreTrainedTokenizerFast, folder: Path
    ) -> None:
        """Its processor is SGLang's own and reads no file; the rest is put in its form."""
        from safetensors.torch import load_file, save_file

        assert spec.vision is not None
        ours = json.loads((folder / "config.json").read_text())
        text = ours["text_config"] | {"architectures": ["Qwen2ForCausalLM"]}
        published = {
            "model_type": self.name,
            "architectures": [self.architecture],
            "llm_config": text,
            "vision_config": _tower(spec.vision)
            | {
                "architectures": ["InternVisionModel"],
                "model_type": "intern_vit_6b",
                "qkv_bias": True,
                "qk_normalization": False,
                "norm_type": "layer_norm",
            },
            "force_image_size": _TILE,
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "use_thumbnail": True,
            "max_dynamic_patch": 12,
            "ps_version": "v2",
            "select_layer": -1,
            "template": "internvl2_5",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        write_json(folder / "config.json", published)
        file = folder / "model.safetensors"
        save_file(_published(load_file(file)), file, metadata={"format": "pt"})


def _tower(tower: VisionSpec) -> dict[str, Any]:
    """What both forms say of the tower."""
    return {
        "num_hidden_layers": tower.depth,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_attention_heads": tower.num_heads,
        "image_size": _TILE,
        "patch_size": _PATCH,
    }


def _published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With OpenGVLab's names, and queries, keys and values in one."""
    import torch

    renamed: dict[str, Any] = {}
    for name, weight in weights.items():
        found = re.search(r"attention\.([qkv])_proj", name)
        if found and "vision_tower" in name:
            if found.group(1) == "q":
                parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                renamed[_renamed(name.replace("attention.q_proj", "attn.qkv"))] = torch.cat(parts)
            continue
        renamed[_renamed(name)] = weight
    return renamed


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


FAMILY = InternVL()
