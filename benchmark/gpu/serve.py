"""This package, in-tree EPD and one server on one GPU: the same answers, and how soon.

    python benchmark/gpu/serve.py --minutes 8 --out OUT
    python benchmark/gpu/serve.py --device cpu --steps parity --rounds 2 --minutes 20

Steps, in their order: log-probabilities of a tiny Qwen3-VL in bfloat16; the time to the first
token with the shapes of Qwen3-VL-8B and random weights, and an encoder that is killed in the
middle of requests; log-probabilities where all make pixels on the CPU, of a tiny Qwen2.5-VL,
and of both in float32; the time to the first token with the shapes of Qwen2.5-VL-7B. A step
that fails is told with the ends of its servers' logs, and the next one begins. Servers of all
arms share the GPU, start side by side, and have the same flags, with a bounded KV cache.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path += [str(ROOT / folder) for folder in ("benchmark", "scripts", "test")]

import msgspec  # noqa: E402
from comparison.arms import Arm  # noqa: E402

from gpu import serve_parity, serve_ttft  # noqa: E402
from gpu.results import aligned  # noqa: E402
from gpu.serve_bench import LEAST_S, Bench, Step  # noqa: E402
from gpu.serve_fleet import (  # noqa: E402
    BY_IPC,
    EARLY_OFF,
    GPU_PIXELS,
    GpuWatch,
    as_sglang_sets_it_up,
    in_tree,
    one_server,
    ours,
)
from gpu.serve_kill import kill  # noqa: E402
from gpu.serve_ttft import Cell  # noqa: E402

# Of requests one at a time, in all cells and arms; and of each load.
_ALONE_S = 100.0
_AGAIN_S = 40.0
_LOAD_S = 6.0
_URL_REPEATS = 4
_TOOLKIT = Path("/usr/local/cuda")


def parity(
    bench: Bench, step: Step, *, dtype: str, models: Sequence[str], on_cpu: bool = False
) -> None:
    """Tiny models, one after the other.

    Args:
        on_cpu: whether pixels are made on the CPU by all, of PNGs, which nvJPEG does not
            decode. Else encoders make them on the GPU, as one server does.
    """
    hardware, pixels, kind = bench.hardware, GPU_PIXELS, "JPEG"
    if on_cpu:
        pixels, kind = {}, "PNG"
        hardware = replace(hardware, flags=f"{hardware.flags} --image-processor-backend pil")
    if dtype == "float32":
        # Flash attention has no float32.
        attention = bench.options.attention_float32
        hardware = replace(hardware, attention=attention, tower_attention="sdpa", graphs=False)
    flags = hardware.of_servers(dtype, max_tokens=20_000)
    for model in models:
        arms = [one_server(caches=False), ours(pixels, to_tokenizer=True)]
        if not on_cpu:
            arms.append(in_tree(pixels))
        label = f"parity-{dtype}-{model}" + ("-cpu" if on_cpu else "")
        with bench.fleet(label, arms, model, flags) as fleet:
            gaps = serve_parity.compare(fleet, bench.options.rounds, kind, bench.left_s)
            wrong = [*serve_parity.verdict(gaps, dtype), *fleet.not_started]
        rows = serve_parity.rows(gaps)
        step.tables[f"{model} in {dtype}, pixels of the {'CPU' if on_cpu else 'GPU'}"] = rows
        print(aligned(rows), *wrong, sep="\n", flush=True)
        step.wrong += [f"{model}: {one}" for one in wrong]
        step.figures[model] = {
            "start_s": fleet.seconds,
            "not_started": fleet.failures,
            "gaps": {name: one.figures for name, one in gaps.items()},
        }
        bench.write()


def ttft(bench: Bench, step: Step, *, model: str) -> None:
    """Time to the first token. In the end the encoder is killed, and the one that follows it
    makes pixels on the GPU, as one server does.
    """
    on_cpu = bench.options.device == "cpu"
    cells = _cells(bench.options)
    arms = [ARMS[name]() for name in bench.options.arms]
    flags = bench.hardware.of_servers("bfloat16", max_tokens=14_000)
    checkpoint = "tiny-3" if on_cpu else model
    with bench.fleet(f"ttft-{model}", arms, checkpoint, flags) as fleet, GpuWatch() as watch:
        step.wrong += fleet.not_started
        figures = step.figures
        figures |= {"start_s": fleet.seconds, "not_started": fleet.failures}
        measured = serve_ttft.Measured()
        loads: list[serve_ttft.Load] = []

        def one_at_a_time(title: str, most_s: float) -> serve_ttft.Measured:
            seconds, repeats = min(most_s, 0.3 * bench.left_s()), bench.options.repeats
            found = serve_ttft.alone(fleet, cells, repeats, seconds, again=title)
            step.wrong += found.failures
            figures[title] = {
                key: [msgspec.to_builtins(one) for one in samples]
                for key, samples in found.samples.items()
            }
            step.tables[title] = serve_ttft.summary(fleet, cells, found)
            for cell in cells:
                step.tables[f"{title}, owners, {cell}"] = serve_ttft.owners(fleet, cell, found)
            figures["memory_mib"] = watch.memory_mib()
            return found

        def first() -> None:
            nonlocal measured
            measured = one_at_a_time("one at a time", _ALONE_S)

        def second() -> None:
            one_at_a_time("one at a time, pixels made on the GPU", _AGAIN_S)

        def under_load() -> None:
            for cell in (one for one in cells if one.images == 1):
                loads.extend(serve_ttft.under_load(fleet, cell, measured, watch, _LOAD_S))
                rows = [serve_ttft.LOAD_TITLES, *(one.row() for one in loads)]
                step.tables["under load"] = rows
            figures["loads"] = [asdict(one) for one in loads]

        def by_url() -> None:
            rows, failures = serve_ttft.by_url(fleet, Cell(1, cells[0].size), _URL_REPEATS)
            step.tables["by URL"] = rows
            step.wrong += failures

        def killed() -> None:
            rows, wrong = kill(fleet, cells[0], bench.start_s, GPU_PIXELS)
            step.tables["encoder killed"] = rows
            step.wrong += wrong

        bench.part(step, fleet, "one at a time", first)
        bench.part(step, fleet, "metrics", fleet.keep_metrics)
        if bench.options.alone:
            return
        if measured.samples:
            bench.part(step, fleet, "under load", under_load)
        if model == "8b":
            bench.part(step, fleet, "by URL", by_url)
        if model == "8b" and "sglang-epd" in fleet.running and bench.left_s() > LEAST_S:
            fleet.end("in-tree")
            bench.part(step, fleet, "encoder killed", killed)
            bench.part(step, fleet, "pixels made on the GPU", second)


def _cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for."""
    sizes = ("448",) if options.device == "cpu" else ("1080p", "448")
    cells = [Cell(images, size) for size in sizes for images in (4, 1)]
    return [cell for cell in cells if not options.cells or str(cell) in options.cells]


STEPS: dict[str, Callable[[Bench, Step], None]] = {
    "parity": partial(parity, dtype="bfloat16", models=["tiny-3"]),
    "ttft-8b": partial(ttft, model="8b"),
    "parity-cpu": partial(parity, dtype="bfloat16", models=["tiny-3"], on_cpu=True),
    "parity-2.5": partial(parity, dtype="bfloat16", models=["tiny-2.5"]),
    "parity-float32": partial(parity, dtype="float32", models=["tiny-3", "tiny-2.5"], on_cpu=True),
    "ttft-7b": partial(ttft, model="7b"),
}
# Of the times to the first token.
ARMS: dict[str, Callable[[], Arm]] = {
    "one": partial(one_server, caches=True),
    "in-tree": in_tree,
    "sglang-epd": ours,
    EARLY_OFF: partial(ours, early=False),
    BY_IPC: as_sglang_sets_it_up,
}
# Steps by the large checkpoint that each needs.
LARGE = {"ttft-8b": "8b", "ttft-7b": "7b"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and serve.json")
    parser.add_argument("--checkpoints", type=Path, help="folder; where there is room unless given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--attention", default="fa3", help="language models' backend")
    parser.add_argument("--attention-float32", default="torch_native")
    parser.add_argument("--tower-attention", default="", help="towers' backend, or SGLang's choice")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs of decode")
    parser.add_argument("--flags", default="", help="of every server, after `=`")
    parser.add_argument("--rounds", type=int, default=6, help="of parity")
    parser.add_argument("--repeats", type=int, default=30, help="of requests one at a time")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS)[:3])
    parser.add_argument("--cells", nargs="+", help='as "4 x 1080p"; all unless given')
    parser.add_argument("--alone", action="store_true", help="only requests one at a time")
    options = parser.parse_args()
    # Ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    large = [name for step, name in LARGE.items() if step in options.steps]
    sys.exit(Bench(options, large).run({name: STEPS[name] for name in options.steps}))


if __name__ == "__main__":
    # Servers of one step leave compiled modules to those of the next.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # SGLang compiles kernels. Of an nvcc in PATH that calls another it would take the folder
    # for the toolkit's, and find no libraries.
    if "CUDA_HOME" not in os.environ and (_TOOLKIT / "lib64").is_dir():
        os.environ["CUDA_HOME"] = str(_TOOLKIT)
    # Servers are asked on loopback.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    main()
