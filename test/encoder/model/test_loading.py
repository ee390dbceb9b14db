from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import packages
from sglang_epd.encoder.model.loading import (
    follow_custom_all_reduce,
    groups_on,
    without_language_model,
)

WEIGHTS = {
    "vision_tower.weight": torch.full((2, 2), 1.0),
    "multi_modal_projector.weight": torch.full((2, 2), 2.0),
    "vision_model.model.layers.0.weight": torch.full((2,), 3.0),
}
OF_THE_LANGUAGE_MODEL = {
    "language_model.model.layers.7.weight": torch.zeros(8, 8),
    "model.embed_tokens.weight": torch.zeros(8, 8),
    "lm_head.weight": torch.zeros(8, 8),
}


class Model(nn.Module):
    """With a language model as large as its configuration says when it is built."""

    def __init__(self, config) -> None:
        super().__init__()
        self.vision_tower = nn.Linear(2, 2, bias=False)
        self.multi_modal_projector = nn.Linear(2, 2, bias=False)
        text = config.text_config
        self.language_model = nn.Sequential(
            nn.Embedding(text.vocab_size, 8, text.pad_token_id),
            *(nn.Linear(8, 8) for _ in range(text.num_hidden_layers)),
        )
        self.language_model.register_buffer("angles", torch.zeros(4096))
        self.read: dict[str, torch.Tensor] = {}

    def load_weights(self, weights) -> None:
        self.read.update(weights)


class Loader:
    def __init__(self, files, *, safe=True) -> None:
        self.files, self.safe = files, safe
        self.opened = []

    def _prepare_weights(self, *_source):
        return "", self.files, self.safe

    def weights(self):
        _, files, safe = self._prepare_weights("")
        if not safe:
            yield from (WEIGHTS | OF_THE_LANGUAGE_MODEL).items()
        for file in files if safe else ():
            self.opened.append(file)
            yield from load_file(file).items()


@pytest.fixture
def config():
    text = SimpleNamespace(num_hidden_layers=40, vocab_size=150_000, pad_token_id=149_999)
    return SimpleNamespace(text_config=text, vision_config=SimpleNamespace(num_hidden_layers=24))


@pytest.fixture
def files(tmp_path):
    """A sharded checkpoint."""
    parts = list((WEIGHTS | OF_THE_LANGUAGE_MODEL).items())
    paths = [str(tmp_path / f"model-{number}-of-3.safetensors") for number in (1, 2, 3)]
    save_file(dict(parts[:2]), paths[0])
    save_file(dict(parts[2:4]), paths[1])
    save_file(dict(parts[4:]), paths[2])
    return paths


@pytest.fixture
def load(monkeypatch, config):
    """Loads a model; returns it, what it was given, and the layers that were built."""
    module = ModuleType("loader")
    module.DefaultModelLoader = Loader
    module._initialize_model = initialize = lambda config: Model(config.hf_config)
    server = ModuleType("server")
    encoder = ModuleType("encoder")
    encoder.server = server
    monkeypatch.setitem(sys.modules, "sglang.srt.model_loader.loader", module)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.encoder", encoder)

    asked = []

    def run(loader, load_format="auto"):
        built = []
        options = SimpleNamespace(load_format=load_format, model_loader_extra_config={"a": 1})

        def sglangs(*, model_config, load_config, device_config):
            model = module._initialize_model(model_config)
            asked.append(load_config)
            built.append(len(model.language_model))
            if load_config.load_format != "sharded_state":
                model.load_weights(loader.weights())
            return model

        arguments = {"model_config": SimpleNamespace(hf_config=config)}
        server.load_model = sglangs
        with without_language_model():
            model = server.load_model(**arguments, load_config=options, device_config=None)
        assert server.load_model is sglangs
        assert module._initialize_model is initialize
        return model, model.read, built[0]

    run.asked = asked
    return run


def test_shards_that_are_found_by_shape_are_not_read(load, files):
    """Nor written: the checkpoint's own files are read."""
    _, read, _ = load(Loader(files), "presharded")
    assert read.keys() == WEIGHTS.keys()
    (options,) = load.asked
    assert (options.load_format, options.model_loader_extra_config) == ("auto", {})


def test_a_loader_that_asks_for_each_parameter_has_the_whole_model(load, config):
    model, _, built = load(Loader([]), "sharded_state")
    assert (built, config.encoder_only) == (41, False)
    assert sum(p.numel() for p in model.language_model.parameters()) == 0


@pytest.mark.parametrize("safe", [True, False])
def test_only_the_towers_tensors_are_read(load, files, safe):
    loader = Loader(files, safe=safe)
    _, read, _ = load(loader)
    assert read.keys() == WEIGHTS.keys()
    assert loader.opened == (files[:2] if safe else [])
    for name, tensor in WEIGHTS.items():
        assert torch.equal(read[name], tensor)


def test_the_language_model_takes_no_memory(load, files):
    model, _, built = load(Loader(files))
    assert built == 2  # its vocabulary and a layer
    assert sum(p.numel() for p in model.language_model.parameters()) == 0
    assert model.language_model.angles.numel() == 0
    assert model.vision_tower.weight.shape == (2, 2)
    # Who asks it for its dtype is answered.
    assert next(model.language_model.parameters()).dtype == torch.float32


def test_a_thinker_is_told_that_it_only_encodes(load, files, config, monkeypatch):
    thinker = SimpleNamespace(**vars(config))
    vars(config).clear()
    config.thinker_config = thinker
    seen = []
    original = Model.__init__

    def build(self, whole):
        seen.append(whole.thinker_config.encoder_only)
        original(self, whole.thinker_config)

    monkeypatch.setattr(Model, "__init__", build)
    _, _, built = load(Loader(files))
    assert (seen, built) == ([True], 2)


def test_the_configuration_is_what_it_was(load, files, config):
    before = vars(config.text_config).copy()
    original = Loader._prepare_weights
    load(Loader(files))
    assert vars(config.text_config) == before
    assert config.vision_config.num_hidden_layers == 24
    assert Loader._prepare_weights is original


def test_a_model_that_cannot_be_built_leaves_nothing_changed(load, config, monkeypatch):
    before = vars(config.text_config).copy()
    original = Loader._prepare_weights
    monkeypatch.setattr(Model, "__init__", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(Loader([]))
    assert vars(config.text_config) == before
    assert Loader._prepare_weights is original


def test_process_groups_are_on_the_towers_own_accelerator(monkeypatch):
    """`MMEncoder` tells the number of its rank, which is another tower's accelerator."""
    encoder, told = ModuleType("encoder"), []
    encoder.server = server = ModuleType("server")
    server.init_distributed_environment = lambda **given: told.append(given)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.encoder", encoder)
    with groups_on(3):
        server.init_distributed_environment(world_size=2, rank=1, local_rank=1)
    server.init_distributed_environment(world_size=2, rank=1, local_rank=1)
    assert [given.pop("local_rank") for given in told] == [3, 1]
    assert told == [{"world_size": 2, "rank": 1}] * 2


@pytest.mark.parametrize("disabled", [False, True])
def test_process_groups_follow_the_flag_of_custom_all_reduces(monkeypatch, disabled):
    """`MMEncoder` makes its groups without a look at it."""
    state = packages.sglang_module("distributed.parallel_state")
    context = packages.sglang_module("runtime_context")
    monkeypatch.setattr(state, "_ENABLE_CUSTOM_ALL_REDUCE", disabled)
    comm = SimpleNamespace(disable_custom_all_reduce=disabled)
    monkeypatch.setattr(context, "get_exec", lambda: SimpleNamespace(comm=comm))
    follow_custom_all_reduce()
    assert state._ENABLE_CUSTOM_ALL_REDUCE is not disabled
