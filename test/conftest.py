"""Settings and fixtures of the whole suite."""

import ctypes
import gc
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from integration.order import servers

# How long one example takes says more of the machine's other work than of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("shared"), max_examples=15)
settings.load_profile("shared")


# Folders of tests that import most of SGLang, which takes ten processor seconds, and files whose
# tests import a part of it.
_IMPORTING = {"seams", "families", "test_preparing", "test_sglang_rpc", "test_server"}
_IMPORTING |= {"test_commands", "test_names", "test_up"}


def _imports_sglang(path: Path) -> bool:
    return not _IMPORTING.isdisjoint({path.parent.name, path.stem})


def pytest_configure() -> None:
    """A shell that runs the suite in the background has it ignore Ctrl-C, which tests send to
    servers of theirs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that import SGLang come first: in one process they take longest."""
    items.sort(key=lambda item: not _imports_sglang(item.path))


class BySharing(LoadScopeScheduling):
    """With `-n`, one process runs a file's tests, all that import SGLang, all that use the same
    servers."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        if path.parent.name == "integration":
            return servers(nodeid)
        return "SGLang" if _imports_sglang(path) else str(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> BySharing:
    return BySharing(config, log)


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
    from sglang_epd import spans
    from spans import Recorded

    recorded = Recorded()
    monkeypatch.setattr(spans.trace, "get_tracer_provider", lambda: recorded.provider)
    return recorded
