"""A language model that is quantised offline, as Qwen publishes its FP8 models, its tower as it
was: the same answer as one colocated server that runs the same checkpoint.

SGLang's float8 kernels are Triton's, and run in its interpreter here; they take bfloat16 only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from checkpoints.families import SPECS
from integration.client import TOLERANCE, data_url, image_part, text_part, user
from integration.counters import status, total
from integration.topology import Machine, checkpoint
from sglang_epd.namespace import of_tower

pytestmark = pytest.mark.extended

TOKENS = 8
EXACT = "tiny-qwen3-vl"
MODEL = f"{EXACT}-fp8"
# What a table of the tower's rotary angles may take, in bytes.
ROOM = 288 * 1024


def question(photographs: list[Image.Image]) -> list[dict[str, Any]]:
    pictures = [photograph.resize((224, 160)) for photograph in photographs]
    return [
        user(*(image_part(data_url(picture)) for picture in pictures), text_part("What is this?"))
    ]


def test_log_probabilities_equal_one_servers(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    messages = question(photographs)
    machine.check(machine.use("quantised").client(), MODEL, messages, TOKENS)


def test_quantisation_was_on(machine: Machine, photographs: list[Image.Image]) -> None:
    """The weights are another checkpoint's, rounded: answers resemble and differ."""
    messages = question(photographs)
    rounded = machine.reference(MODEL, messages, TOKENS).top[0]
    exact = machine.colocated(f"{EXACT}, bfloat16").generation(*messages, tokens=TOKENS).top[0]
    gaps = [abs(exact[token] - rounded[token]) for token in exact.keys() & rounded.keys()]
    assert len(gaps) >= 5
    assert max(gaps) > 10 * TOLERANCE


def test_each_server_holds_its_own_part_and_no_more(machine: Machine) -> None:
    """The tower in bfloat16 on the encoder, so none of the language model; on the language
    server the projections in float8, scales in float32, the rest in bfloat16; and on both
    tables of rotary angles, in bfloat16."""
    topology = machine.use("quantised")
    tower, language, projections = _bytes_to_hold(Path(checkpoint(MODEL)))
    assert projections > ROOM
    assert 0 <= status(topology)["weights_bytes"] - tower < ROOM
    held = total(topology.urls["language"], "language_weights_bytes")
    text = SPECS[MODEL].text
    angles = text.max_position_embeddings * text.head_dim * torch.bfloat16.itemsize
    assert 0 <= held - language - angles < ROOM


def _bytes_to_hold(folder: Path) -> tuple[int, int, int]:
    """Of a checkpoint whose float32 tensors become bfloat16, but for scales: those of the tower,
    of the language model, and of what is quantised in it."""
    tower = language = quantised = 0
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            kept = tensor.dtype != torch.float32 or name.endswith("_scale_inv")
            size = tensor.numel() * (tensor if kept else torch.bfloat16).itemsize
            quantised += size * (tensor.dtype == torch.float8_e4m3fn)
            if of_tower(name):
                tower += size
            else:
                language += size
    return tower, language, quantised
