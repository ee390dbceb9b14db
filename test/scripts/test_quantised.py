"""Checkpoints whose language model is quantised offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.quantised import in_blocks, quantise

NAME = "model.language_model.layers.0.mlp.down_proj.weight"


def test_blocks_times_their_scales_are_the_matrix() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    weight[:128] *= 1000  # one scale for all would lose the rest
    rounded, scales = in_blocks(weight)
    assert (rounded.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scales.shape == (2, 3)
    again = rounded.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Three bits of mantissa; what is tiny in its block is rounded in steps of the format's least.
    assert torch.allclose(again, weight, rtol=2**-4, atol=float(scales.max()) * 2**-9)
    for rows in (slice(0, 128), slice(128, 256)):
        assert (again[rows] - weight[rows]).abs().max() < weight[rows].abs().max() / 16


def test_a_matrix_that_is_not_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="130 x 128"):
        in_blocks(torch.zeros(130, 128))


def test_the_tower_stays_as_it_is(tmp_path: Path) -> None:
    others = {
        "model.visual.blocks.0.attn.o_proj.weight": torch.randn(128, 128),
        "model.language_model.norm.weight": torch.randn(128),
        "lm_head.weight": torch.randn(128, 128),
    }
    save_file({NAME: torch.randn(128, 128)}, tmp_path / "1.safetensors")
    save_file(others, tmp_path / "2.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    quantise(tmp_path)
    assert {n: t.dtype for n, t in load_file(tmp_path / "1.safetensors").items()} == {
        NAME: torch.float8_e4m3fn,
        f"{NAME}_scale_inv": torch.float32,
    }
    kept = load_file(tmp_path / "2.safetensors")
    assert kept.keys() == others.keys()
    assert all(torch.equal(kept[name], weight) for name, weight in others.items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "x"
    assert "model.visual" in config["quantization_config"]["modules_to_not_convert"]
