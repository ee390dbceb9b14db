from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang_epd.families.reading import tensors_other_than
from sglang_epd.namespace import of_language_model, of_tower
from sglang_epd.seams.vision_weights import ReleasedTower, load, one_block, release


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(4, 4)
        self.model = nn.Linear(4, 4)


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
    ) -> int:
        disagg = {"language_only": language_only, "enable_adaptive_dispatch_to_encoder": adaptive}
        flags(disagg=disagg, observability={"enable_metrics": False})
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
LANGUAGE = ("model.layers.0.w", "lm_head.weight", "thinker.model.language_model.layers.0.w")


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
    shards = {"a": TOWERS[:2], "b": LANGUAGE[:2], "c": (TOWERS[2], LANGUAGE[2])}
    for shard, names in shards.items():
        save_file({name: torch.zeros(2) for name in names}, tmp_path / f"{shard}.safetensors")
    paths = [str(tmp_path / f"{shard}.safetensors") for shard in shards]
    monkeypatch.setattr(loader, "_prepare_weights", lambda *_a, **_o: ("folder", paths, True))
    every = [(name, torch.zeros(2)) for names in shards.values() for name in names]
    monkeypatch.setattr(loader, "_get_all_weights", lambda *_a: iter(every))
    before = loader._prepare_weights
    with tensors_other_than(left_out):
        _, files, _ = loader._prepare_weights(None, "path")
        names = [name for name, _ in loader._get_all_weights(None, None, None)]
    assert [Path(file).stem for file in files] == (
        ["b", "c"] if left_out is of_tower else ["a", "c"]
    )
    assert sorted(names) == sorted(LANGUAGE if left_out is of_tower else TOWERS)
    assert loader._prepare_weights is before
