"""Hooks on SGLang, applied when SGLang imports their targets; and whether they hold.

SGLang's `HookRegistry` imports its targets while plug-ins register: the encoder and the
model runner in processes that never use them, and `prometheus_client` before SGLang has
set its metrics directory. It skips a target that another plug-in has hooked before, logs
a target that is gone, and goes on. So the functions are replaced here, and `require` says
whether each of them is in effect. Hooks of other plug-ins, made through the registry, stay
around ours or inside.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, Literal

from sglang_epd.deferred import when_imported
from sglang_epd.errors import ConfigError
from sglang_epd.seams import contract

logger = logging.getLogger(__name__)

_REGISTRY = "sglang.srt.plugins.hook_registry"
# A message names so many problems.
_MOST_NAMED = 3


Kind = Literal["replace", "around", "after"]


@dataclass(frozen=True)
class Hook:
    """A function of ours on one of SGLang's.

    Attributes:
        attribute: a function or class of the module, or `Class.method`.
        kind: `replace` puts ours in its place, a class too; `around` calls
            `function(original, *args)` instead; `after` calls `function(result, *args)` when
            the original has returned, and drops its result.
    """

    module: str
    attribute: str
    kind: Kind
    function: Callable[..., Any]

    @property
    def target(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass
class _State:
    """Of the hooks of one process."""

    installed: list[Hook] = field(default_factory=list)
    # The function that SGLang now calls, or why it cannot.
    applied: dict[Hook, Any] = field(default_factory=dict)
    failed: dict[Hook, str] = field(default_factory=dict)
    # Whether all have to hold.
    required: bool = False


_state = _State()


def install(hooks: Iterable[Hook]) -> None:
    """Apply each as soon as SGLang has imported its module."""
    for hook in hooks:
        _state.installed.append(hook)
        when_imported(hook.module, partial(_apply, hook))


def require() -> None:
    """Nothing may be served in this process unless every hook holds, from now on too.

    The launcher compares what this package leans on with SGLang's sources as well, which
    shows modules that moved; the processes that it starts have the same sources.

    Raises:
        ConfigError: what does not hold; and so does the import of a module whose hook fails.
    """
    _state.required = True
    if why := misfit(sources=multiprocessing.parent_process() is None):
        raise ConfigError(why)


def misfit(*, sources: bool = False) -> str:
    """Why this package does not fit the SGLang that is installed; empty where it does."""
    installed, wanted = contract.versions()
    found = [] if installed == wanted else ["the versions differ"]
    found += _violations() if sources else ()
    found += filter(None, map(_fault, _state.installed))
    return _explain(found) if found else ""


# Once a process.
_violations = functools.cache(contract.violations)


def _explain(problems: Sequence[str]) -> str:
    installed, wanted = contract.versions()
    named = "; ".join(problems[:_MOST_NAMED])
    if len(problems) > _MOST_NAMED:
        named += f"; and {len(problems) - _MOST_NAMED} more (sglang-epd doctor)"
    mend = "Set" if installed == wanted else f"pip install sglang=={wanted}, or set"
    return (
        f"sglang-epd, which is for SGLang {wanted}, does not fit the installed {installed}: "
        f"{named}. {mend} SGLANG_EPD=off to use SGLang's own EPD"
    )


def _apply(hook: Hook, module: ModuleType) -> None:
    owner, _, name = hook.attribute.rpartition(".")
    try:
        holder = attrgetter(owner)(module) if owner else module
        original = getattr(holder, name)
    except AttributeError:
        _fail(hook, f"{hook.target}, which is hooked, is gone")
        return
    ours = _wrap(original, hook)
    setattr(holder, name, ours)
    _state.applied[hook] = ours
    if not owner:
        _hand_on(original, ours)


def _fail(hook: Hook, problem: str) -> None:
    _state.failed[hook] = problem
    if _state.required:
        raise ConfigError(_explain([problem]))
    logger.warning("sglang-epd: %s", _explain([problem]))


def _wrap(original: Any, hook: Hook) -> Any:
    function = hook.function
    if hook.kind == "replace":
        return function

    @functools.wraps(original)
    def around(*args: Any, **options: Any) -> Any:
        return function(original, *args, **options)

    @functools.wraps(original)
    def after(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        function(result, *args, **options)
        return result

    return around if hook.kind == "around" else after


def _hand_on(original: Any, ours: Any) -> None:
    """To the modules that have imported the original by its name."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name in [name for name, value in list(vars(module).items()) if value is original]:
                setattr(module, name, ours)


def _fault(hook: Hook) -> str:
    """Why SGLang would not call ours; empty where it would, or has not imported the module."""
    if hook in _state.failed:
        return _state.failed[hook]
    module = sys.modules.get(hook.module)
    if module is None:
        return ""
    if hook not in _state.applied:
        return f"{hook.target} was being imported before it could be hooked"
    others = _others(hook)
    if _reaches(attrgetter(hook.attribute)(module), _state.applied[hook], others):
        return ""
    names = sorted({source.plugin_name for *_, source in others if source is not None})
    return f"{hook.target}, which is hooked, was replaced by {', '.join(names) or 'something else'}"


def _reaches(found: Any, ours: Any, others: Sequence[tuple[Any, ...]]) -> bool:
    # What replaces a function claims to wrap it, too.
    if found is not ours and any(kind.value == "replace" for kind, *_ in others):
        return False
    while found is not None and found is not ours:
        found = getattr(found, "__wrapped__", None)
    return found is ours


def _others(hook: Hook) -> Sequence[tuple[Any, ...]]:
    """The hooks of other plug-ins on the target: kind, function, source."""
    registry = sys.modules.get(_REGISTRY)
    return registry.HookRegistry._hooks.get(hook.target, ()) if registry else ()
