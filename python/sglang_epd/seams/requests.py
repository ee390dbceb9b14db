"""Hooks on SGLang's tokenizer manager that are this package's receiver's business.

Each finds the receiver through `manager.mm_receiver`, which only a language server has
(`seams/tokenizer.py`), and passes straight through without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def after(method: str) -> Callable[..., None]:
    """A hook that calls `receiver.method(*args)` when SGLang's own has returned.

    Args:
        method: of the receiver, or of a part of it that may be None (`part.method`).
    """

    def hook(_result: Any, manager: Any, *args: Any, **options: Any) -> None:
        if (ours := _find(manager, method)) is not None:
            ours(*args, **options)

    return hook


def around(method: str) -> Callable[..., Any]:
    """A hook that calls `receiver.method(original, manager, *args)` in place of SGLang's own.

    Args:
        method: as of `after`.
    """

    def hook(original: Callable[..., Any], manager: Any, *args: Any, **options: Any) -> Any:
        ours = _find(manager, method)
        if ours is None:
            return original(manager, *args, **options)
        return ours(original, manager, *args, **options)

    return hook


def _find(manager: Any, method: str) -> Any:
    found = getattr(manager, "mm_receiver", None)
    for name in method.split("."):
        if found is None:
            return None
        found = getattr(found, name)
    return found
