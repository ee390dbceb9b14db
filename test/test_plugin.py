from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_epd import plugin
from sglang_epd.seams.scheduler import SchedulerSeam


@pytest.fixture
def installed(monkeypatch):
    """What `register` hooks, without hooking it."""
    found = []
    monkeypatch.setattr(plugin.hooks, "install", found.extend)
    monkeypatch.setattr(plugin.rundir, "draw_run_id", lambda: None)
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


@pytest.mark.parametrize(
    ("scheduler", "module"),
    [(None, "sglang_epd.seams.tokenizer"), ("it", "sglang_epd.seams.scheduler")],
)
def test_each_process_gets_its_own_side(monkeypatch, scheduler, module):
    called = []
    name = "create_frontend" if scheduler is None else "create_backend"
    monkeypatch.setattr(f"{module}.{name}", lambda *args, **options: called.append((args, options)))
    plugin._create_mm_receiver("args", scheduler=scheduler, dtype="float32")
    positional = ("args",) if scheduler is None else ("args", "it")
    assert called == [(positional, {"dtype": "float32"})]


def test_a_scheduler_without_epd_takes_requests_in_as_ever():
    receiver = SimpleNamespace(mm_receiver=None)
    assert plugin._pull_and_pass_on(lambda given: (given, "pulled"), receiver) == (
        receiver,
        "pulled",
    )


def test_a_rank_that_does_not_lead_pulls_nothing():
    receiver = SimpleNamespace(mm_receiver=SchedulerSeam(None, None))
    assert plugin._pull_and_pass_on(lambda _given: None, receiver) is None


def test_a_scheduler_with_epd_holds_back_what_waits():
    class Seam(SchedulerSeam):
        def pass_on(self, pulled):
            return [*pulled, "settled"]

    receiver = SimpleNamespace(mm_receiver=Seam(None, None))
    assert plugin._pull_and_pass_on(lambda _given: ["pulled"], receiver) == ["pulled", "settled"]


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
