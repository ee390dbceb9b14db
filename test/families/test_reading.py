"""What of a checkpoint is read, and the bytes that are held of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from sglang_epd.checkpoint import header
from sglang_epd.families.reading import held_bytes
from sglang_epd.namespace import of_language_model, of_tower

LAYER = "model.language_model.layers.0.mlp"
# Float8 by blocks, GPTQ's eight numbers of four bits in an int32, bitsandbytes' two in a byte,
# and int8 with a scale a row; beside a tower in bfloat16.
SHARDS = (
    {
        f"{LAYER}.down_proj.weight": torch.zeros(128, 256).to(torch.float8_e4m3fn),
        f"{LAYER}.down_proj.weight_scale_inv": torch.zeros(1, 2),
        f"{LAYER}.up_proj.qweight": torch.zeros(32, 128, dtype=torch.int32),
        f"{LAYER}.up_proj.qzeros": torch.zeros(2, 16, dtype=torch.int32),
        f"{LAYER}.up_proj.scales": torch.zeros(2, 128, dtype=torch.float16),
    },
    {
        f"{LAYER}.gate_proj.weight": torch.zeros(16384, 1, dtype=torch.uint8),
        f"{LAYER}.gate_proj.weight.absmax": torch.zeros(512, dtype=torch.uint8),
        f"{LAYER}.o_proj.weight": torch.zeros(128, 128, dtype=torch.int8),
        f"{LAYER}.o_proj.weight_scale": torch.zeros(128, 1),
        "model.visual.blocks.0.attn.proj.weight": torch.zeros(64, 64, dtype=torch.bfloat16),
    },
)
LANGUAGE_BYTES = 128 * 256 + 8 + 4 * (32 * 128 + 2 * 16) + 2 * 256
LANGUAGE_BYTES += 16384 + 512 + 128 * 128 + 4 * 128
TOWER_BYTES = 2 * 64 * 64


@pytest.mark.parametrize(
    ("left_out", "expected"), [(of_tower, LANGUAGE_BYTES), (of_language_model, TOWER_BYTES)]
)
def test_held_bytes_are_those_of_the_quantised_tensors(tmp_path: Path, left_out, expected) -> None:
    model = nn.Module()
    described = 0
    for number, shard in enumerate(SHARDS):
        file = tmp_path / f"{number}.safetensors"
        save_file(shard, file)
        assert sorted(header(file)[0]) == sorted(shard)
        for name, tensor in load_file(file).items():
            if not left_out(name):
                held = nn.Parameter(tensor, requires_grad=False)
                model.register_parameter(name.replace(".", "_"), held)
        described += sum(entry_bytes(file, name) for name in shard if not left_out(name))
    assert held_bytes(model) == expected == described


def test_buffers_count_and_what_is_shared_counts_once() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["words"].weight
    model.register_buffer("scales", torch.zeros(3, dtype=torch.float64))
    assert held_bytes(model) == 8 * 4 * 4 + 3 * 8


def entry_bytes(file: Path, name: str) -> int:
    """By the file's own header."""
    bits = {"F8_E4M3": 8, "I8": 8, "U8": 8, "F16": 16, "BF16": 16, "F32": 32, "I32": 32}
    with safe_open(file, "pt") as opened:
        entry = opened.get_slice(name)
        count = 1
        for size in entry.get_shape():
            count *= size
        return count * bits[entry.get_dtype()] // 8
