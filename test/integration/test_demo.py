"""`scripts/demo` as README names it: answers stream in, each picture's time is told, and nothing
stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LIMIT_S = 400
ROLES = ("encoder", "language")


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_demo_answers_and_leaves_nothing(tmp_path: Path) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [str(Path(__file__).parents[2] / "scripts" / "demo")]
    if sys.prefix.endswith(version):  # .venv-3.12, not .venv
        command += ["--python", version]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    said = done.stdout
    assert done.returncode == 0, said + done.stderr[-4000:]
    assert all(re.search(rf"^ +[\d.]+ s {name} +ready$", said, re.M) for name in ROLES), said
    assert len(re.findall(r"^  answer: +\S+ \S+", said, re.M)) == 2, said
    assert len(re.findall(r"first token after \d+ ms", said)) == 2, said
    # One photograph, and then three.
    encoded = re.findall(r"image (\d): (\d+) tokens from encoder \S+ \(ms: .*forward [\d.]+", said)
    assert [index for index, _ in encoded] == ["0", "0", "1", "2"], said
    assert "no encoder was asked" not in said
    pids = [int(pid) for pid in re.findall(r"started, pid (\d+)$", said, re.M)]
    assert len(pids) == len(ROLES)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    left = [one for one in psutil.process_iter(["environ"]) if _of_ours(one, tmp_path)]
    assert not left
    assert not list(tmp_path.glob("sglang-epd-demo-*"))


def _of_ours(process: psutil.Process, temporary: Path) -> bool:
    environ: dict[str, str] | None = process.info["environ"]  # None of another user's
    return (environ or {}).get("TMPDIR") == str(temporary)
