"""The kit for one GPU: its runner, and its parts in small on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gpu import report, run

# Ends neither by itself nor when it is asked to, nor does what it has started.
STAYS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""
WRITES = """
import json, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(json.dumps(dict(part="writes", headline="42")))
pathlib.Path(sys.argv[2], "server.log").write_text("said a server")
"""


def parts_of(out: Path) -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_a_part_that_fails_or_stays_keeps_no_other_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_END_S", 0.2)
    monkeypatch.setattr(run.Part, "limit_s", 2.0)
    parts = {
        "fails": run.Part(("-c", "print('why it failed'); raise SystemExit(3)"), 1.0),
        "stays": run.Part(("-c", STAYS), 1.0),
        "writes": run.Part(("-c", WRITES, "{json}", "{work}"), 1.0),
    }
    monkeypatch.setattr(run, "PARTS", parts)
    words = ["run.py", "--out", str(tmp_path), "--parts", ",".join(parts)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        run.main()
    assert end.value.code
    ended = parts_of(tmp_path)
    assert {name: one["status"] for name, one in ended.items()} == {
        "fails": "failed (3)",
        "stays": "time limit",
        "writes": "ok",
    }
    assert ended["writes"]["headline"] == "42"
    logs = (tmp_path / "logs.txt").read_text()
    assert "why it failed" in logs
    assert "said a server" in logs
    child = int(str(ended["stays"]["headline"]))
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert [row.split()[0] for row in rows] == ["part", *parts]
    # All of it comes back from the machine in few files.
    assert len(list(tmp_path.iterdir())) == len(parts) + 1


def test_parts_share_the_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {name: run.Part(("-c", "print('ran')"), 1.0) for name in ("first", "second")}
    monkeypatch.setattr(run, "PARTS", parts)
    words = ["run.py", "--out", str(tmp_path), "--parts", "first,second", "--minutes", "0.2"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        run.main()
    assert {one["status"] for one in parts_of(tmp_path).values()} == {"no time left"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, benchmark_folder: Path) -> Path:
    """What a part that needs no server made in small."""
    out = tmp_path_factory.mktemp("gpu")
    words = ["--out", str(out), "--parts", "engine", "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [sys.executable, benchmark_folder / "gpu" / "run.py", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return out


@pytest.mark.servers  # imports SGLang
@pytest.mark.timeout(300)
def test_its_parts_run_on_a_cpu(tiny: Path) -> None:
    made = parts_of(tiny)
    tower = made["engine"]["figures"]
    assert isinstance(tower, dict)
    for one in tower["runs"]:
        for fed in one["runs"]:
            assert fed["rate"] > 0
            assert 0 < fed["busy"] <= 1.05, one
            assert fed["batch"] <= one["arm"]["items"]
            assert fed["patches"] <= one["arm"]["patches"]
            assert fed["host_ms"]["epd-tower"] >= 0
    assert [profile["operators"] for profile in tower["profiles"]]


@pytest.mark.servers
@pytest.mark.timeout(300)
def test_its_page_says_what_the_parts_made(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    page = tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["report.py", str(tiny), "--out", str(page)])
    report.main()
    text = page.read_text()
    assert "| engine | ok |" in text
    assert "### Through the encoder's stages" in text
    monkeypatch.setattr(
        sys, "argv", ["report.py", str(page.with_suffix(".json")), "--out", str(page)]
    )
    report.main()
    assert page.read_text() == text
