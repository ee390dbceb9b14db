"""Which of a checkpoint's tensors, and of a configuration, SGLang's loaders see.

Leans on `model_loader.loader`: `DefaultModelLoader._prepare_weights`, and `_initialize_model`, by
which each loader makes the model whose `load_weights` it then calls. Whether a tensor that is left
out is read all the same, where it shares a file with others, is the loader's: mapped into memory,
as by default, it is not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sglang_epd.checkpoint import header

# The loader that asks for each of a model's parameters by SGLang's name, and calls no
# `load_weights`: it takes no model that has been built in part.
BY_PARAMETER = "sharded_state"


@contextmanager
def tensors_other_than(left_out: Callable[[str], bool]) -> Iterator[None]:
    """Meanwhile models get no tensor whose name is left out, and the default loader opens no
    safetensors file that has nothing else."""
    loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
    prepare, build = loader.DefaultModelLoader._prepare_weights, loader._initialize_model

    def files(self: Any, *args: Any, **options: Any) -> tuple[str, list[str], bool]:
        folder, paths, safe = prepare(self, *args, **options)
        if safe:
            paths = [path for path in paths if not all(map(left_out, header(Path(path))[0]))]
        return folder, paths, safe

    def model(*args: Any, **options: Any) -> nn.Module:
        built = build(*args, **options)
        load = built.load_weights

        def load_wanted(weights: Iterable[tuple[str, Any]], *args: Any, **options: Any) -> Any:
            return load((entry for entry in weights if not left_out(entry[0])), *args, **options)

        built.load_weights = load_wanted
        return built

    loader.DefaultModelLoader._prepare_weights = files
    loader._initialize_model = model
    try:
        yield
    finally:
        loader.DefaultModelLoader._prepare_weights = prepare
        loader._initialize_model = build


@contextmanager
def changed(fields: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Meanwhile objects have other values: of (object, attribute, value)."""
    before = []
    for config, field, value in fields:
        before.append((config, field, getattr(config, field, None)))
        setattr(config, field, value)
    try:
        yield
    finally:
        # The latter of two names of one field was set after the former.
        for config, field, value in reversed(before):
            setattr(config, field, value)


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
