"""The code that checkpoints carry where a family's own is published with its weights only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from checkpoints.build import build
from checkpoints.families import FAMILIES, family_of
from checkpoints.kimi import PROCESSORS
from checkpoints.unweighted import Unweighted
from make_checkpoint import _digest


@pytest.fixture(scope="module")
def kimi() -> ModuleType:
    spec = importlib.util.spec_from_file_location("processing_kimi", PROCESSORS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("size", "grid"),
    [((56, 28), (2, 4)), ((57, 29), (4, 6)), ((1, 1), (2, 2)), ((2800, 2800), (64, 64))],
)
def test_pictures_are_filled_up_to_whole_embeddings(kimi, size, grid) -> None:
    processor = kimi.KimiImageProcessor(grids="grid_thws")
    picture = Image.new("RGB", size, (255, 0, 127))
    made = processor.preprocess([{"type": "image", "image": picture}])
    rows, columns = grid
    assert made["grid_thws"].tolist() == [[1, rows, columns]]
    assert made["pixel_values"].shape == (rows * columns, 3, 14, 14)
    count = processor.media_tokens_calculator({"type": "image", "image": picture})
    assert count == rows * columns // 4


def test_patches_are_in_order_and_edges_black(kimi) -> None:
    picture = Image.new("RGB", (28, 14))
    picture.paste((255, 255, 255), (14, 0, 28, 14))
    made = kimi.KimiImageProcessor().preprocess(picture)
    assert made["image_grid_hws"].tolist() == [[2, 2]]
    black, white, *below = made["pixel_values"]
    assert torch.equal(white, torch.ones(3, 14, 14))
    assert all(torch.equal(patch, -torch.ones(3, 14, 14)) for patch in (black, *below))


UNWEIGHTED = [family for family in FAMILIES.values() if isinstance(family, Unweighted)]


@pytest.mark.parametrize("family", UNWEIGHTED, ids=lambda family: family.name)
def test_a_family_without_weights_has_all_else(family: Unweighted, tmp_path: Path) -> None:
    assert family.stopped
    build(family, family.specs[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == family.name
    assert config["architectures"] == [family.architecture]
    assert config.get("text_config", config)["hidden_size"] == 128
    assert config.get("text_config", config)["num_hidden_layers"] == 4
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "preprocessor_config.json").exists()
    assert not list(tmp_path.glob("*.safetensors"))
    for file in family.carried:
        assert (tmp_path / file.name).read_text() == file.read_text()
    named = (tmp_path / "config.json").read_text()
    named += (tmp_path / "preprocessor_config.json").read_text()
    assert all(file.stem in named for file in family.carried)


def test_other_code_makes_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _digest("tiny-kimi-vl")
    changed = tmp_path / PROCESSORS.name
    changed.write_text(PROCESSORS.read_text() + "# changed")
    monkeypatch.setattr(type(family_of("tiny-kimi-vl")), "carried", (changed,))
    assert _digest("tiny-kimi-vl") != before
