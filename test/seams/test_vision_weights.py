from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang_epd.checkpoint import served
from sglang_epd.errors import ConfigError
from sglang_epd.families.reading import tensors_other_than
from sglang_epd.namespace import of_language_model, of_tower
from sglang_epd.seams.vision_weights import ReleasedTower, leave_out, load, one_block, release


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(4, 4)
        self.model = nn.Linear(4, 4)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


LOADED = {"load_format": "auto", "weight_cache_mode": "off"}


@pytest.fixture
def run(flags):
    """What `load` makes of a runner; while SGLang's own function runs, how deep a tower is."""

    def run(
        model: nn.Module,
        *,
        language_only: bool = True,
        adaptive: bool = False,
        architecture: str = "Qwen3VLForConditionalGeneration",
        draft: bool = False,
        model_flags: dict[str, str] = LOADED,
    ) -> int:
        disagg = {"language_only": language_only, "enable_adaptive_dispatch_to_encoder": adaptive}
        flags(disagg=disagg, observability={"enable_metrics": False}, model=model_flags)
        config = SimpleNamespace(
            vision_config=SimpleNamespace(depth=4), architectures=[architecture]
        )
        seen = []
        load(
            lambda runner: seen.append(runner.model_config.hf_config.vision_config.depth),
            SimpleNamespace(
                model=model, model_config=SimpleNamespace(hf_config=config), is_draft_worker=draft
            ),
        )
        assert config.vision_config.depth == 4
        return seen[0]

    return run


def test_a_language_only_server_builds_and_keeps_no_tower(run):
    model = Model()
    assert run(model) == 1
    assert [name for name, _ in model.named_parameters()] == ["model.weight", "model.bias"]
    with pytest.raises(RuntimeError, match="--language-only"):
        model.visual(None)


@pytest.mark.parametrize(
    "flag", [{"load_format": "sharded_state"}, {"weight_cache_mode": "client"}]
)
def test_a_loader_that_asks_for_each_parameter_has_the_whole_tower(run, flag):
    model = Model()
    assert run(model, model_flags=LOADED | flag) == 4
    assert isinstance(model.visual, ReleasedTower)


def test_a_draft_model_is_left_alone(run):
    model = Model()
    assert run(model, architecture="LlamaForCausalLMEagle3", draft=True) == 4
    assert isinstance(model.visual, nn.Linear)


def test_a_tower_inside_a_thinker_is_found():
    outer = nn.Module()
    outer.thinker = Model()
    release(outer)
    assert isinstance(outer.thinker.visual, ReleasedTower)


@pytest.mark.parametrize("kept", [{"language_only": False}, {"adaptive": True}])
def test_a_tower_that_may_be_used_is_kept(run, kept):
    model = Model()
    assert run(model, **kept) == 4
    assert isinstance(model.visual, nn.Linear)


def test_a_configuration_with_two_names_for_its_depth_is_as_it_was():
    class Config:
        def __init__(self) -> None:
            self.encoder_layers = 3

        @property
        def num_hidden_layers(self) -> int:
            return self.encoder_layers

        @num_hidden_layers.setter
        def num_hidden_layers(self, count: int) -> None:
            self.encoder_layers = count

    thinker = SimpleNamespace(audio_config=Config(), vision_config=None)
    with pytest.raises(KeyError), one_block(SimpleNamespace(thinker_config=thinker)):
        assert thinker.audio_config.encoder_layers == 1
        raise KeyError
    assert thinker.audio_config.encoder_layers == 3


TOWERS = ("visual.blocks.0.w", "model.vision_tower.model.layers.1.w", "thinker.audio_tower.w")
# MiniCPM-o's and Phi-4-multimodal's.
TOWERS += ("vpm.encoder.layers.0.w", "apm.layers.0.fc1.weight")
TOWERS += ("model.embed_tokens_extend.image_embed.img_processor.encoder.layers.0.w",)
LANGUAGE = ("model.layers.0.w", "lm_head.weight", "thinker.model.language_model.layers.0.w")
LANGUAGE += ("llm.model.layers.0.w", "llm.model.embed_tokens.weight", "model.embed_tokens.weight")
LANGUAGE += ("mtp.fc.weight", "talker.text_projection.linear_fc1.bias", "code2wav.decoder.0.w")


def test_whose_a_tensor_is():
    for names, theirs, others in (
        (TOWERS, of_tower, of_language_model),
        (LANGUAGE, of_language_model, of_tower),
    ):
        assert all(map(theirs, names))
        assert not any(map(others, names))
    # A part of the language model that is called after a tower's stays with it; an encoder may
    # read it too.
    assert not of_tower("model.language_model.layers.0.vision_expert.w")
    # Neither says so of what joins them: both may read it.
    assert not of_tower("multi_modal_projector.w")
    assert not of_language_model("multi_modal_projector.w")


# What a quantised layer has beside or in place of its weight: AWQ and GPTQ, compressed
# tensors, FP8 by blocks and by tensors, bitsandbytes.
QUANTISED = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape")
QUANTISED += ("weight_scale_inv", "weight_scale", "input_scale", "SCB", "weight.quant_state.nf4")


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_layers_tensors_are_where_the_layer_is(kind):
    for prefix in ("model", "language_model.model", "model.language_model", "thinker.model"):
        name = f"{prefix}.layers.0.mlp.experts.3.down_proj.{kind}"
        assert of_language_model(name)
        assert not of_tower(name)
    for prefix in ("visual", "model.visual", "thinker.visual", "vision_tower.vision_model"):
        name = f"{prefix}.blocks.0.mlp.down_proj.{kind}"
        assert of_tower(name)
        assert not of_language_model(name)


@pytest.mark.parametrize("left_out", [of_tower, of_language_model])
def test_of_a_sharded_checkpoint_only_what_is_wanted_is_opened(
    sglang, monkeypatch, tmp_path: Path, left_out
):
    loader = sglang("model_loader.loader").DefaultModelLoader
    shards = {"a": TOWERS[1:], "b": LANGUAGE[1:], "c": (TOWERS[0], LANGUAGE[0])}
    for shard, names in shards.items():
        save_file({name: torch.zeros(2) for name in names}, tmp_path / f"{shard}.safetensors")
    paths = [str(tmp_path / f"{shard}.safetensors") for shard in shards]
    monkeypatch.setattr(loader, "_prepare_weights", lambda *_a, **_o: ("folder", paths, True))
    given = []
    model = SimpleNamespace(load_weights=given.extend)
    monkeypatch.setattr(sglang("model_loader.loader"), "_initialize_model", lambda *_a: model)
    before = loader._prepare_weights
    with tensors_other_than(left_out):
        _, files, _ = loader._prepare_weights(None, "path")
        built = sglang("model_loader.loader")._initialize_model(None)
    built.load_weights((name, torch.zeros(2)) for names in shards.values() for name in names)
    assert [Path(file).stem for file in files] == (
        ["b", "c"] if left_out is of_tower else ["a", "c"]
    )
    names = [name for name, _ in given]
    assert sorted(names) == sorted(LANGUAGE if left_out is of_tower else TOWERS)
    assert loader._prepare_weights is before
    assert sglang("model_loader.loader")._initialize_model() is model


@pytest.fixture
def updated(sglang, run, monkeypatch):
    """SGLang's own updates of a real Qwen2-VL, whose `load_weights` ends at a name it does not
    know; its layers are two of the real ones."""
    weights = sglang("model_executor.model_runner_components.weight_updater")
    cls = sglang("models.qwen2_vl").Qwen2VLForConditionalGeneration
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.config = SimpleNamespace(tie_word_embeddings=False)
    model.visual = nn.ModuleDict({"merger": nn.Linear(4, 4)})
    model.model = nn.ModuleDict({"norm": nn.Linear(4, 4)})
    run(model, architecture="Qwen2VLForConditionalGeneration")
    monkeypatch.setattr(weights, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    off = SimpleNamespace(weight_cache_mode="off")
    monkeypatch.setattr(weights, "get_model", lambda: off)
    return weights, model


CHANGED = [
    ("visual.merger.weight", torch.full((4, 4), 7.0)),
    ("model.norm.weight", torch.ones(4, 4)),
]


@pytest.mark.parametrize("form", [None, "direct", "flattened_bucket"])
def test_the_language_models_weights_are_updated_without_the_towers(
    updated, hooked, caplog, monkeypatch, form
):
    hooked("_model_load_weights_direct")
    weights, model = updated
    updater = weights.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    named = CHANGED
    if form == "flattened_bucket":
        bucket = weights.FlattenedTensorBucket(named_tensors=CHANGED)
        named = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
    for _ in range(2):
        done, said = updater.update_weights_from_tensor(named, form)
        assert done, said
    assert torch.equal(model.model["norm"].weight.data, torch.ones(4, 4))
    assert caplog.text.count("visual.merger.weight and its like") == 1
    done, said = updater.load_weights_from_distributed([("model.norm.weight", torch.zeros(4, 4))])
    assert done, said
    assert torch.equal(model.model["norm"].weight.data, torch.zeros(4, 4))


def test_an_update_from_disk_leaves_the_tower_out(updated, tmp_path: Path):
    """By the iterator that SGLang reads files with."""
    _, model = updated
    save_file(dict(CHANGED), tmp_path / "model.safetensors", {"format": "pt"})
    files = importlib.import_module("sglang.srt.model_loader.weight_utils")
    model.load_weights(files.safetensors_weights_iterator([str(tmp_path / "model.safetensors")]))
    assert torch.equal(model.model["norm"].weight.data, torch.ones(4, 4))


def test_what_joined_the_tower_is_left_out_too():
    """Its name says nothing of a tower."""
    model = Model()
    model.multi_modal_projector = nn.Linear(4, 4)
    leave_out(model, release(model))
    names = ("model.weight", "multi_modal_projector.weight", "visual.weight")
    model.load_weights((name, torch.full((4, 4), 3.0)) for name in names)
    assert torch.equal(model.model.weight.data, torch.full((4, 4), 3.0))


def test_a_whole_models_weights_are_updated_whole(sglang, hooked, run):
    hooked("_model_load_weights_direct")
    updater = sglang("model_executor.model_runner_components.weight_updater")
    model = Model()
    run(model, language_only=False)
    ones = [("visual.weight", torch.ones(4, 4))]
    updater._model_load_weights_direct(model, ones)
    assert torch.equal(model.visual.weight.data, torch.ones(4, 4))


@pytest.mark.parametrize("path", ["s3://models/tiny", "redis://host/tiny", "{here}/tiny.gguf"])
def test_weights_that_are_in_no_folder_are_refused_by_name(flags, tmp_path: Path, path):
    (tmp_path / "tiny.gguf").touch()
    path = path.format(here=tmp_path)
    flags(model=LOADED | {"model_path": path, "revision": None})
    with pytest.raises(ConfigError, match=f"--model-path {path}: .* give a folder"):
        served()
