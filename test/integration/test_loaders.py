"""Loaders other than SGLang's default one (`--load-format`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from integration.topology import Machine, Topology, checkpoint

# What differs is how files are read: `encoder/model/test_loading.py` and
# `seams/test_vision_weights.py` have the rest.
pytestmark = pytest.mark.extended
MODEL = "tiny-qwen2_5-vl"
ROLES = ("encoder", "language")
Check = Callable[[str, dict[str, str]], None]


@pytest.fixture
def check(machine: Machine, message: dict[str, Any]) -> Check:
    """An encoder and a language server answer as one server of the safetensors does."""

    def check(folder: str, formats: dict[str, str]) -> None:
        flags = {role: f"--load-format {one}" for role, one in formats.items()}
        topology = Topology(MODEL, ROLES, flags=flags, served_as=folder)
        with machine.lend(topology):
            machine.check(topology.client(), MODEL, [message])

    return check


@pytest.fixture
def emptied(tmp_path: Path) -> Path:
    """The checkpoint without its weights."""
    source = Path(checkpoint(MODEL))
    folder = tmp_path / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


def test_files_of_torch(check: Check, emptied: Path) -> None:
    """One kind for each server: fingerprints are of the tensors."""
    state: dict[str, torch.Tensor] = {}
    for file in Path(checkpoint(MODEL)).glob("*.safetensors"):
        state |= load_file(file)
    torch.save(state, emptied / "model.pt")
    torch.save(state, emptied / "pytorch_model.bin")
    check(str(emptied), {"encoder": "pt", "language": "npcache"})


def test_parameters_by_rank(check: Check, emptied: Path, ask: Callable[..., Any]) -> None:
    """Of the whole model, as SGLang saves it."""
    ask("start", "it", {"model_path": checkpoint(MODEL), "dtype": "float32"})
    ask("save_sharded_model", "it", {"path": str(emptied), "pattern": None, "max_size": None})
    ask("shutdown", "it")
    check(str(emptied), dict.fromkeys(ROLES, "sharded_state"))


def test_parameters_that_are_written_at_the_first_start(check: Check, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(MODEL), folder)
    for _ in range(2):
        check(str(folder), dict.fromkeys(ROLES, "presharded"))


def test_random_weights(machine: Machine, message: dict[str, Any]) -> None:
    """Which SGLang draws alike in every process."""
    drawn = "--load-format dummy"
    with (
        machine.lend(Topology(MODEL, ("colocated",), flags={"colocated": drawn})) as one,
        machine.lend(Topology(MODEL, ROLES, flags=dict.fromkeys(ROLES, drawn))) as ours,
    ):
        expected = one.client("colocated").generation(message)
        ours.client().generation(message).check(expected)


@pytest.mark.skipif(
    find_spec("runai_model_streamer") is None, reason="SGLang's extra runai is not installed"
)
def test_weights_that_are_streamed(check: Check) -> None:
    check(checkpoint(MODEL), dict.fromkeys(ROLES, "runai_streamer"))
