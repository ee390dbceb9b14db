"""Hooks on SGLang, through SGLang's own registry but not before their time.

`HookRegistry` imports its targets while plug-ins register. That would import the
encoder and the model runner into processes that never use them, and before SGLang has
set its metrics directory. So a hook is registered when its module has been imported;
the registry then applies it and corrects whoever imported the name before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from sglang_epd.deferred import when_imported

Kind = Literal["replace", "around", "after", "before"]


def hook(module: str, attribute: str, function: Callable[..., Any], kind: Kind) -> None:
    """Hook `module.attribute` as soon as SGLang has imported `module`.

    Args:
        attribute: a function, or `Class.method`.
        kind: as in SGLang's `HookType`.
    """
    when_imported(module, lambda _module: _apply(f"{module}.{attribute}", function, kind))


def _apply(target: str, function: Callable[..., Any], kind: Kind) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType(kind))
    HookRegistry.apply_hooks()
