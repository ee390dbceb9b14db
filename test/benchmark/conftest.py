"""Lets the tests import what benchmark/ holds for `compare.py` and `ttft.py`.

The folder itself is not on the path: its encoder.py and transfer.py would hide the folders
of these names here.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
# Each after what it imports.
_MODULES = (
    *("pictures", "pages", "open_loop", "comparison", "compare", "ttft", "gpu"),
    *("reproduce", "needless", "validate_report", "validate_loads", "validate_client"),
    *("validate_emulated", "early_cells", "early_page", "early"),
    *("hostile_media", "hostile_attacks", "hostile_report", "overload", "readme"),
)


def _load(name: str) -> None:
    package = BENCHMARK / name / "__init__.py"
    path = package if package.exists() else BENCHMARK / f"{name}.py"
    folders = [str(path.parent)] if path == package else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


for _name in _MODULES:
    if _name not in sys.modules:
        _load(_name)


@pytest.fixture(scope="session")
def benchmark_folder() -> Path:
    return BENCHMARK
