"""Settings and fixtures of the whole suite."""

import ctypes
import gc
import sys

import pytest
from hypothesis import HealthCheck, settings

# How long one example takes says more of the machine's other work than of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("shared"), max_examples=25)
settings.load_profile("shared")


# Folders of tests that import most of SGLang, which takes ten processor seconds.
_IMPORTING = ("seams", "families")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, one process runs a file's tests, and one all that import SGLang, which begins
    with them: they take longest."""
    items.sort(key=lambda item: item.path.parent.name not in _IMPORTING)
    for item in items:
        folder = item.path.parent.name
        group = "sglang" if folder in _IMPORTING else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """What has been imported by now stays: a test's `gc.collect()` need not go through it."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """What SWIG shares between sentencepiece's modules outlives them: to free it, after the
    type that it needs for that is gone, ends the interpreter with a segmentation fault."""
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for shared in vars(module).values():
                if type(shared).__name__ == "PyCapsule":
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(shared))


@pytest.fixture
def recorded(monkeypatch):
    """Our spans go to a provider of this test's (`spans.Recorded`)."""
    from sglang_epd.observability import tracing
    from spans import Recorded

    recorded = Recorded()
    monkeypatch.setattr(tracing.trace, "get_tracer_provider", lambda: recorded.provider)
    return recorded
