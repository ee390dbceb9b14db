from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from sglang_epd import plugin
from sglang_epd.seams.scheduler import SchedulerSeam


@pytest.fixture
def hooked(monkeypatch):
    """What `register` would hook, without hooking it."""
    found: dict[str, str] = {}
    monkeypatch.setattr(
        plugin,
        "hook",
        lambda module, attribute, function, kind: found.update({f"{module}.{attribute}": kind}),
    )
    monkeypatch.setattr(plugin.rundir, "draw_run_id", lambda: found.update(run_id="drawn"))
    return found


@pytest.mark.parametrize("value", ["off", "OFF", " 0 ", "false", "no"])
def test_it_can_be_switched_off(monkeypatch, hooked, value):
    monkeypatch.setenv("SGLANG_EPD", value)
    plugin.register()
    assert not plugin.enabled()
    assert not hooked


@pytest.mark.parametrize("value", [None, "", "on", "1"])
def test_it_is_on_by_default(monkeypatch, value):
    monkeypatch.delenv("SGLANG_EPD", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_EPD", value)
    assert plugin.enabled()


def test_it_hooks_what_it_says(monkeypatch, hooked):
    monkeypatch.delenv("SGLANG_EPD", raising=False)
    plugin.register()
    assert hooked == {
        "run_id": "drawn",
        "sglang.srt.arg_groups.pd_disaggregation_hook.handle_encoder_disaggregation": "around",
        "sglang.srt.disaggregation.encoder.http_server.launch_server": "replace",
        "sglang.srt.disaggregation.encoder.receiver.create_mm_receiver": "replace",
        "sglang.srt.disaggregation.encoder.receiver.EncoderBootstrapServer": "replace",
        "sglang.srt.managers.scheduler_components.request_receiver"
        ".SchedulerRequestReceiver._pull_raw_reqs": "around",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": "around",
        "sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes": "after",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_disaggregation": "after",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.convert_to_span_attrs": "after",
        "sglang.srt.observability.req_time_stats.APIServerReqTimeStats.set_created_time": "around",
        "sglang.srt.observability.trace.TraceCustomIdGenerator.generate_trace_id": "around",
    }


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


def test_a_scheduler_with_epd_holds_back_what_waits():
    class Seam(SchedulerSeam):
        def pass_on(self, pulled):
            return [*pulled, "settled"]

    receiver = SimpleNamespace(mm_receiver=Seam(None, None))
    assert plugin._pull_and_pass_on(lambda _given: ["pulled"], receiver) == ["pulled", "settled"]


def test_sglang_finds_it():
    (found,) = entry_points(group="sglang.srt.plugins", name="sglang_epd")
    assert found.load() is plugin.register


def test_registering_imports_nothing_of_sglang_and_no_metrics():
    """`prometheus_client` before SGLang sets its multiprocess directory blanks /metrics."""
    code = (
        "import sys; from sglang_epd.plugin import register; register();"
        "never = ('prometheus_client', 'sglang.', 'zmq', 'typer', 'rich', 'yaml');"
        "bad = [m for m in sys.modules if m.startswith(never)];"
        "sys.exit(' '.join(bad) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SGLANG_EPD": ""},
    )
    assert done.returncode == 0, done.stderr
