"""Installed packages: where they are, and SGLang's modules without their warnings."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType


def folder_of(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, name
    return Path(next(iter(spec.submodule_search_locations)))


def sglang_module(name: str, *more: str) -> ModuleType:
    """A module of `sglang.srt`, imported with others without their warnings: some ten seconds,
    once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"sglang.srt.{name}")
        for other in more:
            importlib.import_module(f"sglang.srt.{other}")
    gc.collect()
    gc.freeze()  # as after the collection of tests
    return module
