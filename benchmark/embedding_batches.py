"""Embeddings of a batch of page pictures: encoders beside one server, on emulated accelerators.

    .venv/bin/python benchmark/embedding_batches.py [--pages 64] [--rounds 3]

Every server runs a tiny checkpoint with `--is-embedding`, and each of its forward passes takes
the time of an H100 with Qwen2.5-VL-7B (docs/emulated.md), many times as long, so that the work of
this machine is small beside it. One request has all pages, of one picture each. Arms take turns,
each round with pages of its own; times are the emulated machines'.
"""

from __future__ import annotations

import argparse
import base64
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import requests
from main_job import ROOT
from pages import machine, table
from pictures import jpeg

sys.path.insert(0, str(ROOT / "scripts"))

from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerProcess, free_port, stop_all

MODEL = "tiny-qwen2_5-vl"
PROFILE = "h100-qwen2_5-vl-7b"
PAGE = (560, 784)
ARMS = {"one server": 0, "1 encoder": 1, "2 encoders": 2}


def start(arm: str, encoders: int, dilation: float, logs: Path) -> tuple[list[ServerProcess], str]:
    """An arm's servers, and where its requests go."""
    own = {"SGLANG_EPD_EMULATE": PROFILE, "SGLANG_EPD_EMULATE_DILATE": f"{dilation:g}"}
    env = {**os.environ, "SGLANG_VLM_CACHE_SIZE_MB": "0", **own}
    servers, urls = [], []
    for number in range(encoders + 1):
        port = free_port()
        urls.append(f"http://127.0.0.1:{port}")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ensure(MODEL))]
        command += ["--dtype", "float32", "--is-embedding", "--port", str(port)]
        if number < encoders:
            command += ["--encoder-only"]
        elif encoders:
            command += ["--language-only", "--encoder-urls", *urls[:-1]]
            command += ["--encoder-bootstrap-port", str(free_port())]
        server = ServerProcess(
            f"{arm}, {number}",
            command,
            log_path=logs / f"{arm}-{number}.log".replace(" ", "-"),
            ready_url=f"{urls[-1]}/health",
            env=env,
        )
        server.start()
        servers.append(server)
    return servers, urls[-1]


def seconds(url: str, pages: int, seed: int) -> float:
    """How long one request of so many new pages takes."""
    encoded = (base64.b64encode(jpeg(PAGE, (seed, page))).decode() for page in range(pages))
    inputs = [{"image": f"data:image/jpeg;base64,{one}"} for one in encoded]
    begin = time.perf_counter()
    answer = requests.post(
        f"{url}/v1/embeddings", json={"model": "default", "input": inputs}, timeout=600
    )
    answer.raise_for_status()
    assert len(answer.json()["data"]) == pages
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dilate", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark/results/embedding_batches.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    up: list[ServerProcess] = []
    try:
        urls = {}
        for arm, encoders in ARMS.items():
            servers, urls[arm] = start(arm, encoders, options.dilate, logs)
            up += servers
        for server in up:
            server.wait_ready(400.0)
        for number in range(options.rounds + 1):
            for arm, url in urls.items():
                # The first of each is small, and not counted.
                pages = options.pages if number else 2
                taken = seconds(url, pages, number) / options.dilate
                if number:
                    rates[arm].append(pages / taken)
                print(number, arm, f"{pages / taken:.1f} pages/s", flush=True)
    finally:
        stop_all(up)
    whole = rates["one server"]
    rows = [["arm", "pages/s, median", "of each round", "of one server's"]]
    for arm, found in rates.items():
        each = [mine / theirs for mine, theirs in zip(found, whole, strict=True)]
        rows.append(
            [
                arm,
                f"{statistics.median(found):.1f}",
                ", ".join(f"{one:.1f}" for one in found),
                f"{statistics.median(each):.2f}",
            ]
        )
    width, height = PAGE
    options.out.write_text(
        f"# Embeddings of a batch of pages\n\n"
        f"`.venv/bin/python benchmark/embedding_batches.py --pages {options.pages} "
        f"--rounds {options.rounds} --dilate {options.dilate:g}`: {machine()}. One request of "
        f"{options.pages} pages of {width} x {height} px to `/v1/embeddings`, new ones in each "
        f"round; forward passes take {options.dilate:g} times the times of `{PROFILE}`, and "
        f"figures are without that factor.\n\n{table(rows)}\n"
    )
    print(options.out.read_text())


if __name__ == "__main__":
    main()
