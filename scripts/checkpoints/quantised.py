"""Quantises the language model of a checkpoint offline, as Qwen publishes its FP8 models.

Each projection of the language model becomes float8 (e4m3) in blocks of 128 by 128, with a
scale a block beside it; tower, embeddings, norms and the output layer stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
_FORMAT = torch.float8_e4m3fn


def quantise(folder: Path) -> None:
    """Rewrite the weights in `folder`, and say so in its configuration.

    Raises:
        ValueError: a projection's sides are no multiples of a block's.
    """
    for file in folder.glob("*.safetensors"):
        weights: dict[str, torch.Tensor] = {}
        for name, weight in load_file(file).items():
            if "language_model." in name and name.endswith("_proj.weight"):
                weights[name], weights[f"{name}_scale_inv"] = in_blocks(weight)
            else:
                weights[name] = weight
        save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and by what its blocks have to be multiplied, float32.

    Raises:
        ValueError: its sides are no multiples of a block's.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{rows} x {columns} cannot be cut into blocks of {BLOCK}")
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(_FORMAT).max
    return (blocks / scales).view(rows, columns).to(_FORMAT), scales.squeeze((1, 3))
