from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from sglang_epd.namespace import checkpoint_folder, namespace

CONFIG = {
    "architectures": ["QwenVL"],
    "model_type": "qwen_vl",
    "vision_config": {"depth": 2},
    "text_config": {"layers": 4},
}
TENSORS = {
    "visual.blocks.0.weight": torch.arange(600, dtype=torch.float32).reshape(20, 30),
    "visual.merger.bias": torch.ones(8, dtype=torch.bfloat16),
    **{f"visual.blocks.{n}.norm": torch.full((4,), float(n)) for n in (3, 1, 2, 4)},
    "model.layers.0.weight": torch.ones(4, 4),
    "model.embed_tokens.weight": torch.ones(4, 4),
    "lm_head.weight": torch.ones(4, 4),
}


class Checkpoint:
    """A small checkpoint, changed one thing at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = copy.deepcopy(CONFIG)
        self.tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
        self.processor = {"patch_size": 16, "merge_size": 2}
        self.written: dict[str, object] | None = None
        self.shards = 1
        self.dtype = "bfloat16"

    def namespace(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        names = list(self.tensors)
        for shard in range(self.shards):
            part = {name: self.tensors[name] for name in names[shard :: self.shards]}
            save_file(part, self.folder / f"model-{shard}.safetensors", {"format": "pt"})
        (self.folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        if self.written is not None:
            (self.folder / "config.json").write_text(json.dumps(self.written))
        config = SimpleNamespace(to_dict=lambda: self.config)
        return namespace(config, self.folder, self.dtype)


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path / "a")


@pytest.fixture
def unchanged(tmp_path):
    return Checkpoint(tmp_path / "b").namespace()


def test_it_can_be_read_by_a_person(unchanged):
    assert re.fullmatch(r"QwenVL/bfloat16/[0-9a-f]{16}", unchanged)


def test_the_same_content_in_two_folders_is_the_same(checkpoint, unchanged):
    assert checkpoint.namespace() == unchanged
    assert checkpoint.namespace() == unchanged


def test_how_the_checkpoint_is_cut_into_files_does_not_matter(checkpoint, unchanged):
    checkpoint.shards = 3
    assert checkpoint.namespace() == unchanged


def test_how_the_processors_configuration_is_written_does_not_matter(checkpoint, unchanged):
    checkpoint.processor = {"merge_size": 2, "patch_size": 16}
    assert checkpoint.namespace() == unchanged


@pytest.mark.parametrize("place", [0, 300, 599])
def test_one_changed_weight_of_the_tower_differs(checkpoint, unchanged, place):
    weight = checkpoint.tensors["visual.blocks.0.weight"].view(torch.uint8).view(-1)
    weight[place * 4] ^= 1
    assert checkpoint.namespace() != unchanged


@pytest.mark.parametrize(
    "name", ["model.layers.0.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_the_language_models_weights_do_not_matter(checkpoint, unchanged, name):
    checkpoint.tensors[name] += 1
    assert checkpoint.namespace() == unchanged
    del checkpoint.tensors[name]
    assert checkpoint.namespace() == unchanged


@pytest.mark.parametrize(
    "name",
    [
        "vision_model.model.layers.0.weight",
        "vision_model.norm.weight",
        "model.vision_tower.vision_model.layers.0.weight",
        "thinker.audio_tower.layers.0.weight",
        "model.language_model.visual_adapter.weight",
        "multi_modal_projector.weight",
    ],
)
def test_a_tower_is_a_tower_under_any_name(checkpoint, name):
    checkpoint.tensors[name] = torch.zeros(4)
    before = checkpoint.namespace()
    checkpoint.tensors[name] = torch.ones(4)
    assert checkpoint.namespace() != before


def test_a_tensors_name_shape_and_dtype_matter(checkpoint, unchanged):
    seen = {unchanged}
    bias = checkpoint.tensors.pop("visual.merger.bias")
    for name, tensor in (
        ("visual.merger.scale", bias),
        ("visual.merger.bias", bias.reshape(2, 4)),
        ("visual.merger.bias", bias.view(torch.float16)),
    ):
        checkpoint.tensors[name] = tensor
        seen.add(checkpoint.namespace())
        del checkpoint.tensors[name]
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("attribute", "key", "value"),
    [
        ("config", "vision_config", {"depth": 3}),
        ("config", "audio_config", {"depth": 3}),
        ("config", "model_type", "qwen2_vl"),
        ("processor", "patch_size", 14),
    ],
)
def test_configuration_of_the_tower_and_processor_matters(
    checkpoint, unchanged, attribute, key, value
):
    getattr(checkpoint, attribute)[key] = value
    assert checkpoint.namespace() != unchanged


def test_configuration_of_the_language_model_does_not(checkpoint, unchanged):
    checkpoint.config["text_config"] = {"layers": 8}
    assert checkpoint.namespace() == unchanged


def test_the_dtype_matters(checkpoint, unchanged):
    checkpoint.dtype = "float32"
    assert checkpoint.namespace().split("/")[2] != unchanged.split("/")[2]


def test_a_checkpoint_without_weights_or_architecture_has_a_namespace_too(tmp_path):
    config = SimpleNamespace(to_dict=lambda: {"architectures": None})
    assert namespace(config, tmp_path, "float32").startswith("unknown/float32/")


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert checkpoint_folder(str(tmp_path), None) == tmp_path


def test_a_model_of_the_hub_is_looked_up_without_the_network(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, revision, local_files_only):
        asked.append((name, revision, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert checkpoint_folder("org/model", "main") == tmp_path
    assert asked == [("org/model", "main", True)]


TILED = {**CONFIG, "max_dynamic_patch": 12, "transformers_version": "5.0"}
OMNI = {"thinker_config": {"vision_config": {"depth": 2}, "text_config": {"layers": 4}}}


def _with(config: dict[str, object], **changed: object) -> dict[str, object]:
    return {**copy.deepcopy(config), **changed}


@pytest.mark.parametrize(
    ("before", "after", "another"),
    [
        # Tiles, and the thinker's tower, are told of beside "vision_config".
        (TILED, _with(TILED, max_dynamic_patch=6), True),
        (TILED, _with(TILED, use_thumbnail=False), True),
        (OMNI, {"thinker_config": {**OMNI["thinker_config"], "vision_config": {"depth": 3}}}, True),
        (TILED, _with(TILED, text_config={"layers": 5}), False),
        (TILED, _with(TILED, transformers_version="5.1", dtype="float16"), False),
        (TILED, _with(TILED, quantization_config={"quant_method": "fp8"}), False),
        (OMNI, {"thinker_config": OMNI["thinker_config"], "talker_config": {"layers": 1}}, False),
        # One configuration for all: what is the language model's in it is not told apart.
        ({"vision_config": {"depth": 2}}, {"vision_config": {"depth": 2}, "layers": 5}, False),
    ],
)
def test_what_joins_tower_and_language_model_counts(checkpoint, before, after, another):
    checkpoint.written = before
    first = checkpoint.namespace()
    checkpoint.written = after
    assert (checkpoint.namespace() != first) is another
