"""Start-up, memory and idleness of servers: this package, in-tree EPD, colocated.

.venv/bin/python benchmark/main_job.py [--idle-s 30] [--out benchmark/results/main_job.md]
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import requests
from pages import table

from sglang_epd.cli.processes import ServerProcess, free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from make_checkpoint import ensure  # noqa: E402
from photographs import load as load_photograph  # noqa: E402

START_TIMEOUT_S = 300.0


@dataclass
class Arm:
    """One way to serve: which servers, in which environment."""

    name: str
    env: dict[str, str]
    roles: tuple[str, ...]
    start_s: dict[str, list[float]] = field(default_factory=dict)
    memory_mb: dict[str, float] = field(default_factory=dict)
    idle_percent: dict[str, float] = field(default_factory=dict)


ARMS = (
    # Pictures repeat, and each is to be encoded.
    Arm("sglang-epd", {"SGLANG_EPD_EMBEDDING_CACHE_MB": "0"}, ("encoder", "language")),
    Arm("in-tree EPD", {"SGLANG_EPD": "off"}, ("encoder", "language")),
    Arm("colocated", {}, ("colocated",)),
)


def serve(arm: Arm, model: str, logs: Path) -> dict[str, tuple[ServerProcess, str]]:
    """Start an arm's servers one after the other, timing each alone."""
    servers: dict[str, tuple[ServerProcess, str]] = {}
    for role in arm.roles:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--dtype", "float32", "--port", str(port)]
        if role == "encoder":
            command += ["--encoder-only"]
        if role == "language":
            command += ["--language-only", "--encoder-urls", servers["encoder"][1]]
            command += ["--encoder-bootstrap-port", str(free_port())]
        server = ServerProcess(
            role,
            command,
            log_path=logs / f"{arm.name.replace(' ', '-')}-{role}.log",
            ready_url=f"{url}/health",
            env={**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0", **arm.env},
        )
        server.start()
        servers[role] = (server, url)
        arm.start_s.setdefault(role, []).append(server.wait_ready(START_TIMEOUT_S))
    return servers


def tree(server: ServerProcess) -> list[psutil.Process]:
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]


def memory_mb(server: ServerProcess) -> float:
    """Proportional set size of a server and its processes: shared pages count once."""
    return sum(process.memory_full_info().pss for process in tree(server)) / 1e6


def cpu_s(server: ServerProcess) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in tree(server))


def picture(index: int, size: int) -> str:
    """A distinct square crop of a real photograph, as a data URL."""
    photo = load_photograph(("coffee", "rocket")[index % 2])
    left = 16 * (index // 2)
    file = io.BytesIO()
    photo.crop((left, 0, left + 200, 400)).resize((size, size)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def first_token_s(url: str, pictures: list[str]) -> float:
    """Time to the one token of an uncached request."""
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in pictures]
    # A distinct text in front keeps the prefix cache out of it.
    text = {"type": "text", "text": f"Question {time.monotonic_ns()}: "}
    body: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": [text, *parts]}],
        "max_tokens": 1,
        "temperature": 0,
    }
    begin = time.perf_counter()
    requests.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "results" / "main_job.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
    tiny = str(ensure("tiny-qwen2_5-vl"))

    for arm in ARMS:
        servers = serve(arm, tiny, logs)
        front = servers[arm.roles[-1]][1]
        try:
            for index in range(10):
                first_token_s(front, [picture(index, 224)])
            before = {role: cpu_s(server) for role, (server, _) in servers.items()}
            time.sleep(options.idle_s)
            for role, (server, _) in servers.items():
                arm.idle_percent[role] = (cpu_s(server) - before[role]) / options.idle_s * 100
                arm.memory_mb[role] = memory_mb(server)
        finally:
            for server, _ in servers.values():
                server.stop()

    # The first to start reads files from the disk that the others find in memory.
    for arm in reversed(ARMS):
        for server, _ in serve(arm, tiny, logs).values():
            server.stop()

    ours, theirs = ARMS[0], ARMS[1]
    start = [["server", "sglang-epd", "in-tree EPD", "ratio"]]
    for role in ours.roles:
        mine, rival = min(ours.start_s[role]), min(theirs.start_s[role])
        start.append(
            [f"{role}: start-up (s)", f"{mine:.1f}", f"{rival:.1f}", f"{mine / rival:.2f}"]
        )
    for role in ours.roles:
        mine, rival = ours.memory_mb[role], theirs.memory_mb[role]
        start.append([f"{role}: memory (MB)", f"{mine:.0f}", f"{rival:.0f}", f"{mine / rival:.2f}"])
    colocated = ARMS[2]
    idle = [["arm", "server", "idle, % of a core"]]
    idle += [
        [arm.name, role, f"{arm.idle_percent[role]:.2f}"] for arm in ARMS for role in arm.roles
    ]
    machine = ", ".join(
        (
            f"{os.cpu_count()} cores",
            f"Python {platform.python_version()}",
            f"sglang {version('sglang')}",
            f"torch {version('torch')}",
            "float32",
        )
    )
    alone = f"{min(colocated.start_s['colocated']):.1f} s"
    held = f"{colocated.memory_mb['colocated']:.0f} MB"
    page = f"""# Start-up, memory and idleness

`.venv/bin/python benchmark/main_job.py`, one run: {machine}.

All arms run on the same CPU platform, with a tiny checkpoint; one server starts at a time. Of a
start-up the better of two is told, the first in this order of the arms and the second in the
other; memory is the proportional set size of a server's processes after ten requests.

## Start-up and memory

{table(start)}

A colocated server started in {alone} and held {held}.

## Idle servers ({options.idle_s:.0f} s)

{table(idle)}
"""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
