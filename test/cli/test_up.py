"""What `up` makes of what is typed; `test/integration/test_cli.py` runs it."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from cli.conftest import server
from docs.conftest import launcher  # noqa: F401
from sglang_epd.cli import runs
from sglang_epd.cli import up as module
from sglang_epd.cli.main import app
from sglang_epd.cli.topology import Fleet, Shape
from sglang_epd.errors import ConfigError, EpdError


def dry(*arguments: str) -> Result:
    command = ["up", "--dry-run", "--gpus", "none", "--model", "org/model", *arguments]
    return CliRunner().invoke(app, command)


def test_a_dry_run_prints_commands_that_can_be_copied():
    shown = dry("--encoders", "2", "--prefill", "1", "--decode", "1", "--flags", "--dtype float32")
    assert shown.exit_code == 0, shown.output
    commands = [shlex.split(line) for line in shown.stdout.splitlines()]
    modules = [command[command.index("-m") + 1] for command in commands]
    assert modules == ["sglang.launch_server"] * 4 + ["sglang_router.launch_router"]
    assert all("float32" in command for command in commands[:4])


def test_a_dry_run_for_machines():
    made = json.loads(dry("--json", "--gpus", "2,3").stdout)
    encoder, language = made["servers"]
    assert [one["env"]["CUDA_VISIBLE_DEVICES"] for one in (encoder, language)] == ["2", "3"]
    assert made["api_url"] == language["url"]
    assert encoder["url"] in language["argv"]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (
            "--encoders 4 --language-flags '--tp-size 4'",
            "encoder tp 1 on 0; encoder tp 1 on 1; encoder tp 1 on 2; encoder tp 1 on 3; "
            "language tp 4 on 4,5,6,7",
        ),
        (
            "--encoders 2 --prefill 1 --decode 1 --prefill-flags '--tp-size 2' "
            "--decode-flags '--tp-size 4'",
            "encoder tp 1 on 0; encoder tp 1 on 1; prefill tp 2 on 2,3; decode tp 4 on 4,5,6,7",
        ),
    ],
)
def test_eight_gpus_are_dealt_by_the_ranks_of_each_role(typed, wanted, launcher):  # noqa: F811
    made = json.loads(dry("--json", "--gpus", "0,1,2,3,4,5,6,7", *shlex.split(typed)).stdout)
    dealt = []
    for one in made["servers"]:
        if one["role"] != "router":
            start = one["argv"].index("sglang.launch_server") + 1
            given = launcher.parse_args(one["argv"][start:])
            assert given.encoder_only is (one["role"] == "encoder")
            assert given.language_only is (one["role"] in ("language", "prefill"))
            gpus = one["env"]["CUDA_VISIBLE_DEVICES"]
            dealt.append(f"{one['role']} tp {given.tp_size} on {gpus}")
    assert "; ".join(dealt) == wanted


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--encoders", "0"], "--encoders"),
        (["--model", "./no/such/folder"], "--model"),
        (["--host", "192.0.2.1"], "--host"),
        (["--gpus", "0"], "--gpus"),
        (["--flags", "--encoder-only"], "--flags"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(arguments, named):
    refused = dry(*arguments)
    assert isinstance(refused.exception, EpdError), refused.output
    assert named in str(refused.exception)


def test_json_is_for_dry_runs():
    refused = CliRunner().invoke(app, ["up", "--model", "m", "--json"])
    assert isinstance(refused.exception, ConfigError)
    assert "status --json" in str(refused.exception)


def test_a_port_that_is_taken_is_refused_only_if_it_was_asked_for(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = dry("--port", str(port))
        assert "--port" in str(refused.exception)
        monkeypatch.setattr(module, "_USUAL_PORT", port)
        assert dry().exit_code == 0


@pytest.mark.parametrize(
    ("name", "value", "passes"),
    [
        ("encoder_wait_s", "soon", False),
        ("media_max_mb", "-1", False),
        ("store", "s3://bucket", False),
        ("store", "file:///folder", True),
    ],
)
def test_settings_are_checked_before_anything_starts(monkeypatch, name, value, passes):
    monkeypatch.setenv(f"SGLANG_EPD_{name.upper()}", value)
    assert (f"SGLANG_EPD_{name.upper()}" in str(dry().exception)) is not passes


def test_prefill_and_decode_apart_need_mooncake(monkeypatch):
    find = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "mooncake" else find(name)
    )
    refused = dry("--prefill", "1", "--decode", "1")
    assert "pip install" in str(refused.exception)
    assert dry().exit_code == 0


@pytest.mark.parametrize("flags", ["--flags", "--prefill-flags"])
def test_behind_the_mini_load_balancer_no_key_is_asked_for(flags):
    refused = dry("--prefill", "1", "--decode", "1", flags, "--api-key K")
    assert "forwards no key" in str(refused.exception)
    assert dry("--flags", "--api-key K").exit_code == 0
    assert dry("--prefill", "1", "--decode", "1", "--encoder-flags", "--api-key K").exit_code == 0


@pytest.mark.parametrize(("gpus", "hidden"), [("none", True), ("", False)])
def test_servers_on_the_cpu_do_not_see_accelerators(monkeypatch, gpus, hidden):
    monkeypatch.setattr(module, "accelerators", list)
    places = module._places(gpus, Shape(model="m", encoders=1, language=1))
    assert places(1).env == ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})


def test_a_run_is_recorded_and_shown_while_it_lives(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    seen = []

    def stop_when_ready() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end and not seen:
            time.sleep(0.05)
            living = runs.find(runs.root())
            seen.extend(told for told in living if told["servers"][0]["state"] == "ready")
        os.kill(os.getpid(), signal.SIGINT)

    made = server("encoder", "encoder")
    out = Console(file=io.StringIO(), width=200)
    watching = threading.Thread(target=stop_when_ready)
    watching.start()
    module._run(
        Fleet((made,), made.url),
        out,
        model="m",
        quiet=False,
        timeout_s=20,
    )
    watching.join()
    assert (seen[0]["pid"], seen[0]["model"], seen[0]["api_url"]) == (os.getpid(), "m", made.url)
    shown = out.file.getvalue()
    assert made.line() in shown
    assert f"Ready. Chat requests go to {made.url}/v1/chat/completions" in shown
    assert shown.endswith("All servers have stopped.\n")
    assert runs.find(runs.root()) == []
