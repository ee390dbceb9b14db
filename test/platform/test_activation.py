"""When the platform offers itself, and that it registers without importing anything heavy."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from sglang_epd import platform


@pytest.fixture
def bare_machine(monkeypatch):
    """A machine on which torch finds no accelerator."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def test_offers_itself_without_an_accelerator(bare_machine):
    assert platform.activate() == "sglang_epd.platform.cpu:CpuPlatform"


@pytest.mark.parametrize("backend", ["cuda", "xpu", "mps"])
def test_steps_aside_for_a_built_in_accelerator(bare_machine, backend):
    bare_machine.setattr(getattr(torch, backend), "is_available", lambda: True)
    assert platform.activate() is None


@pytest.mark.parametrize("backend", ["npu", "musa", "hpu"])
def test_steps_aside_for_an_accelerator_that_a_package_adds(bare_machine, backend):
    class Available:
        is_available = staticmethod(lambda: True)

    bare_machine.setattr(torch, backend, Available, raising=False)
    assert platform.activate() is None


def test_steps_aside_for_any_other_torch_accelerator(bare_machine):
    bare_machine.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform.activate() is None


def test_steps_aside_for_the_in_tree_cpu_engine(bare_machine):
    bare_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_register_does_nothing_where_the_platform_steps_aside(monkeypatch):
    monkeypatch.setattr(platform, "accelerator_present", lambda: True)
    finders = list(sys.meta_path)
    platform.register()
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("driver", "hidden", "warned"),
    [
        (True, None, True),
        (True, "", False),
        (True, "-1", False),
        (False, None, False),
    ],
)
def test_a_driver_without_a_gpu_is_told_of(bare_machine, tmp_path, caplog, driver, hidden, warned):
    """As in a container that was given none of its host's GPUs."""
    version = tmp_path / "version"
    if driver:
        version.touch()
    bare_machine.setattr(platform, "_DRIVER", version)
    bare_machine.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        bare_machine.setenv("CUDA_VISIBLE_DEVICES", hidden)
    bare_machine.setattr("sglang_epd.platform.seams.install", lambda: None)
    platform.register()
    assert ("sees no GPU" in caplog.text) == warned
    bare_machine.setattr(sys, "argv", ["launch_server.py", "--encoder-only"])
    with pytest.raises(SystemExit, match="sees no GPU") if warned else nullcontext():
        platform.register()


def test_musa_and_hpu_packages_count_as_accelerators(bare_machine):
    bare_machine.setattr(
        platform.importlib.util, "find_spec", lambda name: name == "habana_frameworks" or None
    )
    assert platform.accelerator_present()


def test_registering_imports_nothing_that_fixes_state_early():
    """`prometheus_client` before SGLang sets its multiprocess directory blanks /metrics."""
    code = (
        "import sys; from sglang_epd.platform import register; register();"
        "bad = [m for m in sys.modules if m.startswith('prometheus_client')"
        " or m.startswith('sglang.srt.layers') or m.startswith('sglang.srt.managers')];"
        "sys.exit(' '.join(bad) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "0"},
    )
    assert done.returncode == 0, done.stderr
