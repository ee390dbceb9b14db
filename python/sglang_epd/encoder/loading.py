"""Loads a tower without the language model behind it.

Some of SGLang's models know `--encoder-only` and build none; others build it in any case.
These are given a configuration in which it has no layers and next to no vocabulary, so that
the model's own code stays as it is, whatever it calls its parts. Of the checkpoint no tensor
of the language model is read, and files that have no other are not opened.

Leans on `disaggregation.encoder.server.load_model`, the name under which `MMEncoder` calls
`model_loader.get_model(model_config=, load_config=, device_config=)`, and on
`families.reading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from sglang_epd.families.reading import tensors_other_than
from sglang_epd.namespace import of_language_model

# What configurations call the language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_VOCABULARY = 64


@contextmanager
def without_language_model() -> Iterator[None]:
    """While `MMEncoder` is made, what it loads is a tower alone."""
    from sglang.srt.disaggregation.encoder import server

    load = server.load_model

    def load_tower(*, model_config: Any, load_config: Any, device_config: Any) -> nn.Module:
        with _nothing_to_say(model_config.hf_config), tensors_other_than(of_language_model):
            model: nn.Module = load(
                model_config=model_config, load_config=load_config, device_config=device_config
            )
        return model

    server.load_model = load_tower
    try:
        yield
    finally:
        server.load_model = load


@contextmanager
def _nothing_to_say(hf_config: Any) -> Iterator[None]:
    """The language model's configuration without layers, while the model is built."""
    hf_config = getattr(hf_config, "thinker_config", hf_config)
    # SGLang writes what is the language model's into the whole model's configuration, too.
    configs = [hf_config, *(getattr(hf_config, name, None) for name in _TEXT_CONFIGS)]
    changed = []
    for config in configs:
        for field, value in (("num_hidden_layers", 0), ("vocab_size", _VOCABULARY)):
            if isinstance(getattr(config, field, None), int):
                changed.append((config, field, getattr(config, field)))
                setattr(config, field, value)
    try:
        yield
    finally:
        for config, field, value in reversed(changed):
            setattr(config, field, value)
