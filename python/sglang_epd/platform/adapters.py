"""LoRA adapters (`--enable-lora`): their tables in ordinary memory.

SGLang pins the tables by which a batch finds its adapters, in its torch-native backend too. There
is no pinned memory without an accelerator, and no copy to one that it would speed up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Of `LoRAManager`: what makes tables, of layers and of batches.
PINNING = ("init_lora_modules", "update_lora_info", "prepare_lora_batch")


class Unpinned(TorchFunctionMode):
    """Where it is entered, tensors are not pinned."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **options)


def install(lora_manager: ModuleType) -> None:
    """Wrap the methods of `LoRAManager` that make tables."""
    manager = lora_manager.LoRAManager
    for name in PINNING:
        setattr(manager, name, _unpinned(getattr(manager, name)))


def _unpinned(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        with Unpinned():
            return method(*args, **options)

    return call
