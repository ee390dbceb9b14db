from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_epd.seams import local_rate
from sglang_epd.seams.vision_weights import ReleasedTower, release


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Linear(4, 4)
        self.model = nn.Linear(4, 4)


@pytest.fixture
def run(sglang, monkeypatch):
    def run(model: nn.Module, *, language_only: bool = True, adaptive: bool = False) -> None:
        flags = SimpleNamespace(
            language_only=language_only, enable_adaptive_dispatch_to_encoder=adaptive
        )
        monkeypatch.setattr(sglang("runtime_context"), "get_disagg", lambda: flags)
        release(None, SimpleNamespace(model=model))

    return run


def test_a_language_only_server_gives_its_tower_back(run):
    model = Model()
    run(model)
    assert [name for name, _ in model.named_parameters()] == ["model.weight", "model.bias"]
    with pytest.raises(RuntimeError, match="--language-only"):
        model.visual(None)


def test_a_tower_inside_a_thinker_is_found(run):
    outer = nn.Module()
    outer.thinker = Model()
    run(outer)
    assert isinstance(outer.thinker.visual, ReleasedTower)


def test_once_released_it_stays_released(run):
    model = Model()
    run(model)
    released = model.visual
    run(model)
    assert model.visual is released


@pytest.mark.parametrize("kept", [{"language_only": False}, {"adaptive": True}])
def test_a_tower_that_may_be_used_is_kept(run, kept, monkeypatch, tmp_path):
    monkeypatch.setattr(local_rate, "path", lambda: tmp_path / "tower")
    model = Model()
    run(model, **kept)
    assert isinstance(model.visual, nn.Linear)
    for _ in range(2):
        model.visual(torch.zeros(3, 4))
    measured = local_rate.read(tmp_path / "tower") > 0
    assert measured == kept.get("adaptive", False)
