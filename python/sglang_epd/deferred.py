"""Change a module when it is imported, without importing it earlier.

SGLang's `HookRegistry.apply_hooks` imports what it hooks, in the launcher too. The modules
hooked here pull in `prometheus_client`, which must not be imported before SGLang has
set its multiprocess directory (else `/metrics` stays blank), and they cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Call `change(module)` once, now if `name` is imported already, else right after."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        change(module)
        return
    sys.meta_path.insert(0, _Watch(name, change))


class _Watch(MetaPathFinder):
    """Finds nothing itself; wraps the loader that the finders after it give for one name.

    It goes when the module has run, not when it was found: a module is also looked for
    by those who only ask whether it exists, and an import may fail.
    """

    def __init__(self, name: str, change: Change) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ChangingLoader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        # In this order: a change that refuses the module refuses it each time.
        self._change(module)
        sys.meta_path.remove(self)


class _ChangingLoader(Loader):
    """Runs a change after the module's own code; all else is the wrapped loader's."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)
