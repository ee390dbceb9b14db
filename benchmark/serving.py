"""`sglang.bench_serving` with image requests against encoder + language servers.

    .venv/bin/python benchmark/serving.py [--rounds 5] [--out benchmark/results/serving.md]

Three arms: this package, in-tree EPD (`SGLANG_EPD=off`), and one colocated server. All are
up, and warm from a run that does not count; in each round they take turns, another one first each
time, with requests of that round's seed, so that no arm has seen them before. `bench_serving`
does not warm up: it would send the first of the requests that it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from main_job import ARMS, ROOT, Arm, ensure, serve
from pages import machine, table

from sglang_epd.cli.processes import ServerProcess, stop_all

FLAGS = (
    "--backend sglang-oai-chat --dataset-name image --image-count 3 --image-resolution 360p "
    "--random-input-len 64 --random-output-len 32 --num-prompts 32 --request-rate 2 "
    "--warmup-requests 0"
)
_WARM_SEED = 1000


MEASURES = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")


def bench(url: str, model: str, logs: Path, seed: int) -> dict[str, Any]:
    output = logs / "bench.jsonl"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.bench_serving", *FLAGS.split(), "--seed", str(seed)]
    command += ["--base-url", url, "--model", model, "--output-file", str(output)]
    with (logs / "bench.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
    result: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return result


def measure(model: str, rounds: int, logs: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each arm, what `bench_serving` says of each round."""
    up: list[ServerProcess] = []
    urls: dict[str, str] = {}
    try:
        for arm in ARMS:
            servers = serve(Arm(arm.name, arm.env, arm.roles), model, logs)
            up += [server for server, _ in servers.values()]
            urls[arm.name] = servers[arm.roles[-1]][1]
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
        for url in urls.values():
            bench(url, model, logs, seed=_WARM_SEED)
        for number in range(rounds):
            order = list(urls)
            for _ in range(number % len(order)):
                order.append(order.pop(0))
            for name in order:
                results[name].append(bench(urls[name], model, logs, seed=1 + number))
                print(number, name, [results[name][-1][key] for key in MEASURES], flush=True)
    finally:
        stop_all(up)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-qwen2_5-vl")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "results" / "serving.md")
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-"))
    results = measure(str(ensure(options.model)), options.rounds, logs)
    titles = ["mean TTFT (ms)", "median TTFT", "p99 TTFT", "mean TPOT"]
    rows = [["arm", "succeeded", *titles]]
    ratios = [["sglang-epd to", *titles]]
    for name, of in results.items():
        done = f"{sum(one['completed'] for one in of)} of {32 * len(of)}"
        middle = [statistics.median(one[key] for one in of) for key in MEASURES]
        rows.append([name, done, *(f"{value:.0f}" for value in middle)])
        if name == ARMS[0].name:
            continue
        cells = []
        for key in MEASURES:
            pairs = zip(results[ARMS[0].name], of, strict=True)
            each = sorted(ours[key] / theirs[key] for ours, theirs in pairs)
            cells.append(f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
        ratios.append([name, *cells])
    page = f"""# `sglang.bench_serving`, image requests

`.venv/bin/python benchmark/serving.py --rounds {options.rounds}`: all arms up, in turns, medians
of the rounds, each with a seed of its own.
{machine()}, sglang {version("sglang")}, checkpoint {options.model}, float32.

    python -m sglang.bench_serving {FLAGS} --seed N

{table(rows)}

The ratio of each round; their median, lowest and highest:

{table(ratios)}
"""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
