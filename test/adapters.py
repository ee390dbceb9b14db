"""LoRA adapters of small random checkpoints, in the form of PEFT's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4


def adapter(checkpoint: str, folder: Path, seed: int) -> Path:
    """Write an adapter of all linear layers of a checkpoint's language model.

    Args:
        checkpoint: path of the model, with one configuration of text.
        folder: to be made.
        seed: each has other weights, strong enough to change every answer.
    """
    whole = json.loads((Path(checkpoint) / "config.json").read_text())
    config = whole.get("text_config", whole)
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // heads
    layers = {
        "self_attn.q_proj": (hidden, heads * head),
        "self_attn.k_proj": (hidden, kv_heads * head),
        "self_attn.v_proj": (hidden, kv_heads * head),
        "self_attn.o_proj": (heads * head, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in layers.items():
            place = f"base_model.model.model.language_model.layers.{number}.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, inputs, generator=draw)
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, RANK, generator=draw) / 50
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "bias": "none",
                "target_modules": [name.partition(".")[2] for name in layers],
            }
        )
    )
    return folder
