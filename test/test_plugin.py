from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_epd import plugin


@pytest.fixture
def installed(monkeypatch):
    """What `register` hooks, without hooking it."""
    found = []
    monkeypatch.setattr(plugin.hooks, "install", found.extend)
    monkeypatch.setattr(plugin.hooks, "require", lambda: found.append("required"))
    return found


@pytest.mark.parametrize("role", [True, False])
def test_all_hooks_are_installed_and_have_to_hold_where_there_is_a_role(installed, role):
    plugin.register(role=role)
    assert installed == [*plugin.HOOKS, *(["required"] * role)]


def test_with_another_version_nothing_is_hooked_but_what_ends_servers(monkeypatch, installed):
    monkeypatch.setattr(plugin.contract, "version", lambda _name: "0.5.24")
    plugin.register(role=False)
    assert installed == list(plugin.GUARDS)
    assert {hook.function.__name__ for hook in installed} == {"resolve", "hold"}


def test_a_target_is_hooked_once():
    """The way back from a target to its hook is one."""
    targets = [hook.target for hook in plugin.HOOKS]
    assert len(set(targets)) == len(targets)


def test_registering_imports_nothing_of_sglang_and_no_metrics():
    """`prometheus_client` before SGLang sets its multiprocess directory blanks /metrics."""
    code = (
        "import sys; from sglang_epd.entry import register; register();"
        "never = ('prometheus_client', 'sglang.', 'zmq', 'typer', 'rich', 'yaml');"
        "bad = [m for m in sys.modules if m.startswith(never)];"
        "sys.exit(' '.join(bad) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--language-only"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SGLANG_EPD": ""},
    )
    assert done.returncode == 0, done.stderr
