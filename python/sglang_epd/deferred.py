"""Change a module when it is imported, without importing it earlier.

SGLang's `HookRegistry.apply_hooks` imports its targets, in the launcher too. The modules
hooked here pull in `prometheus_client`, which must not be imported before SGLang has
set its multiprocess directory (else `/metrics` stays blank), and they cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def when_imported(name: str, change: Change) -> None:
    """Call `change(module)` once, now if `name` is imported already, else right after."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        change(module)
        return
    sys.meta_path.insert(0, _Watch(name, change))


class _Watch(MetaPathFinder):
    """Finds nothing itself; has the loader that the finders after it give for one name run
    the change behind the module's own code.

    It goes when the module has run, not when it was found: a module is also looked for
    by code that only asks whether it exists, and an import may fail.
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
                # Of a source file, and made for this import.
                loader: Any = spec.loader
                if loader is not None:
                    loader.exec_module = self._and_change(loader.exec_module)
                return spec
        return None

    def _and_change(self, run: Change) -> Change:
        def execute(module: ModuleType) -> None:
            run(module)
            # In this order: a change that refuses the module refuses it each time.
            self._change(module)
            sys.meta_path.remove(self)

        return execute
