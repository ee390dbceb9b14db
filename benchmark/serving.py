"""`sglang.bench_serving` with image requests against encoder + language servers.

    .venv/bin/python benchmark/serving.py [--out benchmark/results/serving.md]

Runs the same seeded requests against three arms, one after the other: this package,
in-tree EPD (`SGLANG_EPD=off`), and one colocated server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from main_job import ARMS, ROOT, Arm, ensure, serve
from pages import table

FLAGS = (
    "--backend sglang-oai-chat --dataset-name image --image-count 3 --image-resolution 360p "
    "--random-input-len 64 --random-output-len 32 --num-prompts 32 --request-rate 2"
)


def bench(url: str, model: str, logs: Path) -> dict[str, Any]:
    output = logs / "bench.jsonl"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.bench_serving", *FLAGS.split(), "--seed", "1"]
    command += ["--base-url", url, "--model", model, "--output-file", str(output)]
    with (logs / "bench.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "results" / "serving.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
    model = str(ensure(options.model))
    rows = [["arm", "succeeded", "mean TTFT (ms)", "p99 TTFT (ms)", "mean TPOT (ms)"]]
    for arm in ARMS:
        servers = serve(Arm(arm.name, arm.env, arm.roles), model, logs)
        try:
            result = bench(servers[arm.roles[-1]][1], model, logs)
        finally:
            for server, _ in servers.values():
                server.stop()
        figures = [result[key] for key in ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")]
        rows.append([arm.name, f"{result['completed']} of 32", *(f"{one:.0f}" for one in figures)])
        print(rows[-1], flush=True)
    page = f"""# `sglang.bench_serving`, image requests

`.venv/bin/python benchmark/serving.py`, one run, the arms one after the other.
{os.cpu_count()} cores, sglang {version("sglang")}, checkpoint {options.model}, float32.

    python -m sglang.bench_serving {FLAGS} --seed 1

{table(rows)}
"""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
