"""`sglang-epd up` and `status` as a user types them: up, a chat, a death, and down again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.client import Client
from integration.topology import START_TIMEOUT_S, Machine, checkpoint
from sglang_epd.cli.processes import free_port

pytestmark = pytest.mark.extended
COMMAND = [sys.executable, "-m", "sglang_epd.cli.main"]
# An encoder that was killed, while it is started again.
AWAY = ("down", "starting")
ROLES = ["encoder", "encoder", "prefill", "decode", "router"]


@dataclass
class Up:
    """A running `up`.

    Attributes:
        runtime: its XDG_RUNTIME_DIR, by which its processes are known as well.
        temporary: its TMPDIR.
    """

    process: subprocess.Popen[bytes]
    runtime: Path
    temporary: Path
    output: Path

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and document of `status --json`; nothing before `up` has a state."""
        done = subprocess.run(
            [*COMMAND, "status", "--json"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)},
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or "{}")

    def until(self, true: Callable[[int, dict[str, Any]], bool]) -> dict[str, Any]:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            code, told = self.status()
            if told and true(code, told):
                return told
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            assert time.monotonic() < end, told
            time.sleep(1)

    def left(self) -> list[psutil.Process]:
        """Processes of this `up`, itself too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime):
                    found.append(process)
        return found


@pytest.fixture(scope="module")
def up(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    machine.clear()
    runtime = tmp_path_factory.mktemp("runtime")
    # Short: sockets are in it.
    temporary = tmp_path_factory.mktemp("t")
    output = runtime / "output"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [
                *COMMAND,
                *("up", "--model", checkpoint("tiny-qwen2_5-vl"), "--port", str(free_port())),
                *("--encoders", "2", "--prefill", "1", "--decode", "1"),
                *("--flags", "--dtype float32", "--gpus", "none"),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": str(runtime),
                "TMPDIR": str(temporary),
                # In turn, so that both have something to do.
                "SGLANG_EPD_DISPATCH_POLICY": "round_robin",
            },
        )
    running = Up(process, runtime, temporary, output)
    yield running
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            # The kernel ends the servers with it.
            process.kill()
            process.wait()


def test_a_life_of_up(up: Up, message: dict) -> None:
    told = up.until(lambda code, _told: code == 0)
    assert [server["role"] for server in told["servers"]] == ROLES
    assert {server["state"] for server in told["servers"]} == {"ready"}
    first, second, prefill, *_ = told["servers"]
    assert first["namespace"] == second["namespace"] == prefill["namespace"] != ""

    api = Client(told["run"]["api_url"])
    assert api.answer(message)

    def counted(_code: int, told: dict[str, Any]) -> bool:
        return told["servers"][2]["items"] == 4

    after = up.until(counted)
    first, second, prefill, decode, _ = after["servers"]
    assert first["items"] == second["items"] == 2
    assert prefill["encoders"] == {"ready": 2}
    assert (decode["role"], decode["items"]) == ("decode", None)

    os.kill(first["pid"], signal.SIGKILL)
    up.until(lambda code, told: code == 1 and told["servers"][0]["state"] in AWAY)
    assert api.answer(message)
    again = up.until(lambda code, _told: code == 0)["servers"][0]
    assert again["restarts"] == 1
    assert again["pid"] not in (None, first["pid"])
    assert again["namespace"] == first["namespace"]
    up.until(lambda _code, told: told["servers"][2]["encoders"] == {"ready": 2})
    assert api.answer(message)

    assert len(up.left()) > len(ROLES)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0, up.output.read_text()[-4000:]
    assert not up.left()
    assert not list((up.runtime / "sglang-epd").iterdir())
    assert not list(up.temporary.iterdir())
    shown = up.output.read_text()
    assert "encoder-0 = was killed by signal 9" in shown
    assert f"--model-path {checkpoint('tiny-qwen2_5-vl')} --encoder-only" in shown
    assert "prefill   | " in shown
