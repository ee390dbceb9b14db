"""Loads a tower without the language model behind it, for models that do not know
`--encoder-only` themselves.

Such a model builds its language model in any case. It is given a configuration in which
that has one layer, the least that SGLang's models take, and next to no vocabulary, so
that the model's own code stays as it is, whatever it calls its parts. Of the checkpoint
only what is not the language model's is read, tensor by tensor, and what was built of the
language model is given back.

Leans on `disaggregation.encoder.server.load_model`, the name under which `MMEncoder` calls
`model_loader.get_model(model_config=, load_config=, device_config=)`, and on
`model_loader.loader.DefaultModelLoader` (`_prepare_weights`, `_get_all_weights`, `Source`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sglang_epd.namespace import of_language_model

logger = logging.getLogger(__name__)

# What configurations call the language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# Of a language model that says nothing; the id of its padding has to be in its vocabulary.
_NOTHING = {"num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}

Load = Callable[..., nn.Module]


def without_language_model(load: Load) -> Load:
    """`model_loader.get_model` for a tower alone."""

    def load_tower(*, model_config: Any, load_config: Any, device_config: Any) -> nn.Module:
        with _nothing_to_say(model_config.hf_config), _towers_tensors_only():
            model = load(
                model_config=model_config, load_config=load_config, device_config=device_config
            )
        _empty(model)
        held = sum(tensor.numel() * tensor.element_size() for _, tensor in _state(model))
        logger.info("Holds the tower alone: %.1f MiB", held / 2**20)
        return model

    return load_tower


@contextmanager
def _nothing_to_say(hf_config: Any) -> Iterator[None]:
    """The language model's configuration, next to nothing while the model is built."""
    found = [getattr(hf_config, name, None) for name in _TEXT_CONFIGS]
    # SGLang may have copied its fields to the whole model's, and some models read those.
    configs = [config for config in (hf_config, *found) if hasattr(config, "num_hidden_layers")]
    changed: list[tuple[Any, str, Any]] = []
    for config in configs:
        for field, value in _NOTHING.items():
            changed.append((config, field, getattr(config, field, None)))
            setattr(config, field, value)
    try:
        yield
    finally:
        for config, field, value in changed:
            setattr(config, field, value)


@contextmanager
def _towers_tensors_only() -> Iterator[None]:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_all_weights

    def tensors(loader: Any, model_config: Any, model: nn.Module) -> Iterator[Any]:
        source = DefaultModelLoader.Source.init_new(model_config, model)
        _, files, safe = loader._prepare_weights(
            source.model_or_path,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if safe:
            return _read(files)
        every = original(loader, model_config, model)
        return (entry for entry in every if not of_language_model(entry[0]))

    DefaultModelLoader._get_all_weights = tensors
    try:
        yield
    finally:
        DefaultModelLoader._get_all_weights = original


def _read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of safetensors files that are not the language model's."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if not of_language_model(name):
                    yield name, file.get_tensor(name)


def _empty(model: nn.Module) -> None:
    """Give back the tensors that the language model has all the same."""
    for name, tensor in _state(model):
        if of_language_model(name):
            tensor.data = tensor.data.new_empty(0)


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
