from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from packages import sglang_module
from sglang_epd import checkpoint as files
from sglang_epd.checkpoint import CONFIG, PROCESSOR_CONFIGS
from sglang_epd.errors import ConfigError
from sglang_epd.namespace import namespace

CONFIG_OF = {
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


def identity(
    config: dict[str, object], folder: Path, dtype: str, *weights: Path, **more: object
) -> str:
    """The namespace of a folder, whose weights are in these files."""
    named = [folder / name for name in (CONFIG, *PROCESSOR_CONFIGS)]
    configs = {path.name: json.loads(path.read_text()) for path in named if path.exists()}
    held = files.Checkpoint(configs, weights, **more)
    return namespace(SimpleNamespace(to_dict=lambda: config), held, dtype)


class Checkpoint:
    """A small checkpoint, changed one thing at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = copy.deepcopy(CONFIG_OF)
        self.tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
        self.processor = {"patch_size": 16, "merge_size": 2}
        self.written: dict[str, object] | None = None
        self.shards = 1
        self.dtype = "bfloat16"
        self.form = "safetensors"

    def namespace(self, **more: object) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        names = list(self.tensors)
        for shard in range(self.shards):
            part = {name: self.tensors[name] for name in names[shard :: self.shards]}
            self.save(part, f"model-{shard}")
        (self.folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        if self.written is not None:
            (self.folder / "config.json").write_text(json.dumps(self.written))
        weights = self.folder.glob(f"*.{self.form}")
        return identity(self.config, self.folder, self.dtype, *weights, **more)

    def save(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        path = self.folder / f"{name}.{self.form}"
        if self.form == "bin":
            torch.save(tensors, path)
        else:
            save_file(tensors, path, {"format": "pt"})


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


LANGUAGE = ("model.layers.0.weight", "model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        # How a checkpoint is cut into files, and a configuration written.
        (lambda made: setattr(made, "shards", 3), True),
        (lambda made: setattr(made, "processor", dict(reversed(made.processor.items()))), True),
        *((lambda made, name=name: made.tensors[name].add_(1), True) for name in LANGUAGE),
        *((lambda made, name=name: made.tensors.pop(name), True) for name in LANGUAGE),
        (lambda made: made.config.update(text_config={"layers": 8}), True),
        (lambda made: made.config.update(vision_config={"depth": 3}), False),
        (lambda made: made.config["vision_config"].update(dtype="float16"), True),
        (lambda made: made.config.update(audio_config={"depth": 3}), False),
        (lambda made: made.config.update(model_type="qwen2_vl"), False),
        (lambda made: made.processor.update(patch_size=14), False),
        (lambda made: setattr(made, "dtype", "float32"), False),
    ],
)
def test_what_an_embedding_depends_on_counts_and_nothing_else(checkpoint, unchanged, change, same):
    change(checkpoint)
    changed = checkpoint.namespace()
    assert (changed == unchanged) is same
    assert (changed.split("/")[2] == unchanged.split("/")[2]) is same


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_one_changed_weight_of_the_tower_differs(checkpoint, place, form):
    checkpoint.form = form
    unchanged = checkpoint.namespace()
    weight = checkpoint.tensors["visual.blocks.0.weight"].view(torch.uint8).view(-1)
    weight[place * 4] ^= 1
    assert checkpoint.namespace() != unchanged


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


def test_files_of_torch_are_cut_and_read_alike(checkpoint):
    checkpoint.form = "bin"
    unchanged = checkpoint.namespace()
    checkpoint.shards = 3
    assert checkpoint.namespace() == unchanged
    checkpoint.tensors["lm_head.weight"] += 1
    assert checkpoint.namespace() == unchanged
    # A slice of another tensor, whose bytes do not lie in a row.
    wide = torch.zeros(20, 60)
    wide[:, ::2] = checkpoint.tensors["visual.blocks.0.weight"]
    checkpoint.tensors["visual.blocks.0.weight"] = wide[:, ::2]
    assert checkpoint.namespace() == unchanged


class Exotic:
    """What unpickling would have to import."""


@pytest.mark.parametrize(
    ("content", "old_form"), [({"visual.weight": torch.ones(4)}, True), ({"it": Exotic()}, False)]
)
def test_a_file_of_torch_that_cannot_be_read_is_named(tmp_path, content, old_form):
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path, _use_new_zipfile_serialization=not old_form)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*as safetensors"):
        identity(CONFIG_OF, tmp_path, "float32", path)


def test_random_weights_are_no_checkpoints(checkpoint, unchanged):
    held = files.Checkpoint({"preprocessor_config.json": checkpoint.processor}, None)
    config = SimpleNamespace(to_dict=lambda: checkpoint.config)
    assert namespace(config, held, "bfloat16") not in (
        unchanged,
        identity(checkpoint.config, checkpoint.folder, "bfloat16"),
    )


def test_a_checkpoint_without_weights_or_architecture_has_a_namespace_too(tmp_path):
    assert identity({"architectures": None}, tmp_path, "float32").startswith("unknown/float32/")


TILED = {**CONFIG_OF, "max_dynamic_patch": 12, "transformers_version": "5.0"}
# As a checkpoint that was quantised has it, saved again.
SAVED = {"depth": 2, "dtype": "float16"}
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
        (TILED, _with(TILED, compression_config={"format": "pack-quantized"}), False),
        (OMNI, {"thinker_config": {**OMNI["thinker_config"], "vision_config": SAVED}}, False),
        (OMNI, {"thinker_config": OMNI["thinker_config"], "talker_config": {"layers": 1}}, False),
        # One configuration for all: what is the language model's in it is not told apart.
        ({"vision_config": {"depth": 2}}, {"vision_config": {"depth": 2}, "layers": 5}, False),
        # MiMo-V2's.
        ({"processor_config": {"fps": 2}}, {"processor_config": {"fps": 4}}, True),
    ],
)
def test_what_joins_tower_and_language_model_counts(checkpoint, before, after, another):
    checkpoint.written = before
    first = checkpoint.namespace()
    checkpoint.written = after
    assert (checkpoint.namespace() != first) is another


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("chunk", [1 << 20, 100])
def test_a_full_fingerprint_sees_a_change_anywhere(checkpoint, form, chunk, monkeypatch, caplog):
    """Of 40,000 bytes the samples have 1536."""
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk)
    caplog.set_level("INFO")
    checkpoint.form = form
    checkpoint.tensors["visual.blocks.0.weight"] = torch.arange(10_000, dtype=torch.float32)
    weight = checkpoint.tensors["visual.blocks.0.weight"].view(torch.uint8)
    samples, full = checkpoint.namespace(), checkpoint.namespace(whole=True)
    weight[5000 * 4 // 3] ^= 1
    assert checkpoint.namespace() == samples
    assert checkpoint.namespace(whole=True) != full
    weight[5000 * 4 // 3] ^= 1
    checkpoint.shards = 2
    assert checkpoint.namespace(whole=True) == full
    assert "file 2 of 2" in caplog.text
    # Both are shown where two servers do not agree.
    assert re.fullmatch(r"QwenVL/bfloat16/full-[0-9a-f]{16}", full)


def test_weights_that_are_quantised_as_they_are_loaded_are_others(checkpoint, unchanged):
    fp8 = checkpoint.namespace(quantization="fp8")
    assert fp8.startswith("QwenVL/bfloat16+fp8/")
    assert checkpoint.namespace() == unchanged


@pytest.mark.parametrize(
    ("flag", "configs", "online"),
    [
        (None, {}, ""),
        ("fp8", {"config.json": {"text_config": {}}}, "fp8"),
        (None, {"config.json": {"quantization_config": {"quant_method": "fp8"}}}, ""),
        ("awq_marlin", {"config.json": {"quantization_config": {"quant_method": "awq"}}}, ""),
        ("compressed-tensors", {"config.json": {"compression_config": {"format": "int"}}}, ""),
        ("fp8", {"config.json": {"text_config": {"quantization_config": {"bits": 8}}}}, ""),
        ("modelopt_fp4", {"config.json": {}, "hf_quant_config.json": {"quantization": {}}}, ""),
        (
            "quark_mxfp4",
            {"config.json": {"quantization_config": {"quant_method": "modelopt"}}},
            "quark_mxfp4",
        ),
    ],
)
def test_what_the_flag_does_to_weights_that_are_not_quantised(flag, configs, online, monkeypatch):
    sglang_module("configs.model_config")
    monkeypatch.delenv("SGLANG_FP8_IGNORED_LAYERS", raising=False)
    assert files.online_quantization(flag, configs) == online
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", "visual")
    ignoring = files.online_quantization(flag, configs)
    assert ignoring == (f"{online}-without-visual" if online else "")


def test_options_for_the_processing_of_media_make_another(checkpoint, unchanged):
    config = SimpleNamespace(to_dict=lambda: checkpoint.config)
    held = files.Checkpoint({}, ())
    made = {namespace(config, held, "bfloat16", told) for told in ("", "one", "two")}
    assert len(made) == 3
    assert namespace(config, held, "bfloat16", "one").startswith(
        "QwenVL/bfloat16+mm-process-config/"
    )


def test_another_way_of_making_pixels_makes_another(checkpoint, unchanged, monkeypatch):
    """What an earlier version has put into a store is not found."""
    monkeypatch.setattr("sglang_epd.namespace.PIXELS", 0)
    assert checkpoint.namespace() != unchanged


def test_files_without_a_tower_are_refused(checkpoint):
    """All such checkpoints would be one."""
    checkpoint.tensors = {"model.layers.0.weight": torch.ones(4, 4)}
    with pytest.raises(ConfigError, match="no tensor of a vision or audio tower"):
        checkpoint.namespace()
