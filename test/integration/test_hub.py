"""Models by their name on a hub: servers that download, from a real one on the loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hub import Hub, serving
from integration.client import TOLERANCE, data_url, image_part, text_part, user
from integration.forked import ForkServer
from integration.topology import Machine, Topology, checkpoint

NAME = "acme/tiny-vl"
MODEL = "tiny-qwen2_5-vl"
TOKENS = 16
WHOLE = "model.safetensors"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Its revision "main" has files that no server needs; "torch" another tower, in a file
    that `torch.save` wrote."""
    root = tmp_path_factory.mktemp("repository")
    for revision in ("main", "torch"):
        shutil.copytree(checkpoint(MODEL), root / revision)
    (root / "main" / "README.md").write_text("A model.")
    (root / "main" / ".gitattributes").write_text("*.safetensors filter=lfs")
    (root / "main" / "onnx").mkdir()
    (root / "main" / "onnx" / "model.onnx").write_bytes(bytes(1000))
    tensors = load_file(root / "torch" / WHOLE)
    for name, tensor in tensors.items():
        if name.endswith("merger.mlp.2.weight"):
            tensors[name] = -tensor
    torch.save(tensors, root / "torch" / "pytorch_model.bin")
    (root / "torch" / WHOLE).unlink()
    with serving(Hub({NAME: {name: root / name for name in ("main", "torch")}}, slow_s=2)) as hub:
        yield hub


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hub's cache of this machine, empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def online(hub: Hub, cache: Path) -> Iterator[dict[str, Any]]:
    """Servers that can reach the hub."""
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    with closing(ForkServer(env)) as forks:
        yield {"env": env, "forks": forks, "served_as": NAME}


def question(photographs: list[Image.Image]) -> dict[str, Any]:
    picture = image_part(data_url(photographs[0]))
    return user(picture, text_part("What is in this picture?"))


# The tests of this file follow each other: what the first downloads the second finds.


def test_servers_download_a_model_together(
    machine: Machine, online: dict[str, Any], hub: Hub, photographs: list[Image.Image]
) -> None:
    asked = question(photographs)
    reference = machine.reference(MODEL, [asked], TOKENS)
    with machine.lend(Topology(MODEL, ("encoder", "language"), **online)) as topology:
        answer = topology.client().generation(asked, tokens=TOKENS)
    assert answer.distance(reference) < TOLERANCE
    assert hub.fetched[WHOLE] == 1
    assert "onnx/model.onnx" not in hub.fetched


def test_servers_start_offline_from_what_was_downloaded(
    machine: Machine, cache: Path, hub: Hub, photographs: list[Image.Image]
) -> None:
    asked = question(photographs)
    reference = machine.reference(MODEL, [asked], TOKENS)
    env = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url, "HF_HOME": str(cache)}
    hub.fetched.clear()
    with closing(ForkServer(env)) as forks:
        topology = Topology(MODEL, ("encoder", "language"), env, forks=forks, served_as=NAME)
        with machine.lend(topology):
            answer = topology.client().generation(asked, tokens=TOKENS)
    assert answer.distance(reference) < TOLERANCE
    assert not hub.fetched


@pytest.mark.extended  # test_checkpoint.py compares what servers find of such a revision
def test_a_revision_is_downloaded_into_a_folder(
    machine: Machine, online: dict[str, Any], tmp_path: Path, photographs: list[Image.Image]
) -> None:
    """Its weights are in torch's own format, and its tower is another."""
    asked = question(photographs)
    main = machine.reference(MODEL, [asked], TOKENS)
    flags = f"--revision torch --download-dir {tmp_path}"
    roles = ("encoder", "language", "colocated")
    topology = Topology(MODEL, roles, flags=dict.fromkeys(roles, flags), **online)
    with machine.lend(topology):
        reference, answer = (
            topology.client(role).generation(asked, tokens=TOKENS)
            for role in ("colocated", "language")
        )
    assert list(tmp_path.rglob("pytorch_model.bin"))
    assert answer.distance(reference) < TOLERANCE
    assert answer.top[0] != main.top[0]
