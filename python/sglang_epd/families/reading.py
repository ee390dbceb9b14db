"""Which of a checkpoint's tensors, and of a configuration, SGLang's loader sees.

Leans on `model_loader.loader.DefaultModelLoader` (`_prepare_weights`, `_get_all_weights`).
Whether a tensor that is left out is read all the same, where it shares a file with others,
is the loader's: mapped into memory, as by default, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from sglang_epd.checkpoint import header


@contextmanager
def tensors_other_than(left_out: Callable[[str], bool]) -> Iterator[None]:
    """Meanwhile loaders see no tensor whose name is left out, and no safetensors file that
    has nothing else."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    prepare, read = DefaultModelLoader._prepare_weights, DefaultModelLoader._get_all_weights

    def files(loader: Any, *args: Any, **options: Any) -> tuple[str, list[str], bool]:
        folder, paths, safe = prepare(loader, *args, **options)
        if safe:
            paths = [path for path in paths if not all(map(left_out, header(Path(path))[0]))]
        return folder, paths, safe

    def tensors(loader: Any, model_config: Any, model: nn.Module) -> Iterator[Any]:
        every = read(loader, model_config, model)
        return (entry for entry in every if not left_out(entry[0]))

    DefaultModelLoader._prepare_weights = files
    DefaultModelLoader._get_all_weights = tensors
    try:
        yield
    finally:
        DefaultModelLoader._prepare_weights = prepare
        DefaultModelLoader._get_all_weights = read


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
