"""Where installed packages are, without importing them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folder_of(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, name
    return Path(next(iter(spec.submodule_search_locations)))
