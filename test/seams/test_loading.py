"""A tower is loaded with a language model that has nothing to say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.encoder import loading


@pytest.fixture
def server(sglang):
    return sglang("disaggregation.encoder.server")


def text(layers: int) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=layers, vocab_size=1000, hidden_size=32)


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(text_config=text(4), vision_config=text(3)),
        # The whole model's repeats the language model's.
        SimpleNamespace(num_hidden_layers=4, vocab_size=1000, text_config=text(4)),
        SimpleNamespace(thinker_config=SimpleNamespace(text_config=text(4))),
        SimpleNamespace(llm_config=text(4)),
    ],
)
def test_the_language_model_has_no_layers_while_a_tower_is_loaded(server, monkeypatch, config):
    before = repr(config)
    seen = []

    def load(*, model_config, load_config, device_config):
        seen.append(repr(model_config.hf_config))

    monkeypatch.setattr(server, "load_model", load)
    model_config = SimpleNamespace(hf_config=config)
    with loading.without_language_model():
        server.load_model(model_config=model_config, load_config=None, device_config=None)
    assert server.load_model is load
    assert "num_hidden_layers=4" not in seen[0]
    assert (repr(text(3)) in seen[0]) == ("vision_config" in before)
    assert repr(config) == before


def test_what_was_changed_is_put_back_when_loading_fails(server, monkeypatch):
    def load(**_):
        raise OSError("no such file")

    monkeypatch.setattr(server, "load_model", load)
    config = SimpleNamespace(text_config=text(4))
    with pytest.raises(OSError, match="no such file"), loading.without_language_model():
        server.load_model(
            model_config=SimpleNamespace(hf_config=config), load_config=None, device_config=None
        )
    assert config.text_config == text(4)
    assert server.load_model is load
