"""This package, in-tree EPD and one server on one GPU: the same answers, and how soon.

    python benchmark/gpu/serve.py --minutes 8 --out OUT
    python benchmark/gpu/serve.py --device cpu --steps parity --rounds 2 --minutes 20

Steps, in their order: log-probabilities of tiny models in bfloat16 and in float32, the time
to the first token with the shapes of Qwen3-VL-8B and Qwen2.5-VL-7B and random weights, and
an encoder that is killed in the middle of requests. A step that fails is told with the ends
of its servers' logs, and the next one begins. Servers of all arms share the GPU, start side
by side, and have the same flags: a bounded KV cache, and no CUDA graphs unless `--graphs`
asks for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("benchmark", "scripts", "test")]


from gpu import serve_checkpoints, serve_parity, serve_ttft  # noqa: E402
from gpu.results import aligned, machine  # noqa: E402
from gpu.serve_fleet import Fleet, GpuWatch, Hardware, in_tree, one_server, ours  # noqa: E402
from gpu.serve_kill import kill  # noqa: E402
from gpu.serve_ttft import Cell  # noqa: E402

_START_S = {"cuda": 150.0, "cpu": 400.0}
# What a step needs at least, start-up included.
_LEAST_S = 60.0
# Of requests one at a time, in all cells and arms; and of each load.
_ALONE_S = 75.0
_LOAD_S = 6.0
_URL_REPEATS = 4
# Both large checkpoints.
_LARGE_BYTES = 40 << 30


@dataclass
class Step:
    """What became of a step.

    Attributes:
        status: "ok"; "failed", where something was measured that is not as it should be;
            "broken", where it could not be measured; "skipped", where time was short;
            "unfinished".
        wrong: why it is not ok.
        tables: rows by title, the first of each its head.
        figures: everything measured, as plain data.
    """

    status: str = "unfinished"
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One run.

    Args:
        options: as typed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.hardware = Hardware(
            device=options.device,
            attention=options.attention,
            tower_attention=options.tower_attention,
            graphs=options.graphs,
            flags=options.flags,
        )
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self._checkpoints: Path = options.checkpoints or _roomy() / "sglang-epd-checkpoints"
        self._end = time.monotonic() + 60 * options.minutes
        self.steps: dict[str, Step] = {}
        self._making: dict[str, subprocess.Popen[bytes]] = {}

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def run(self, names: list[str]) -> int:
        """All steps; returns the process's exit status."""
        _check_package()
        print(f"checkpoints: {self._checkpoints}; {machine()}", flush=True)
        try:
            self._make_ahead(names)
            for name in names:
                self._step(name, STEPS[name])
        finally:
            for making in self._making.values():
                making.kill()
            self._print()
        return int(
            any(step.status in ("failed", "broken", "unfinished") for step in self.steps.values())
        )

    def checkpoint(self, name: str) -> Path:
        """The folder of a checkpoint; waits where it is being made.

        Raises:
            RuntimeError: it could not be made.
        """
        making = self._making.pop(name, None)
        if making is not None and making.wait(max(1.0, self.left_s())) != 0:
            raise RuntimeError(f"checkpoint {name} could not be made")
        return serve_checkpoints.make(name, self._checkpoints)

    @contextmanager
    def fleet(self, label: str, arms: list[Any], model: str, flags: str) -> Iterator[Fleet]:
        """The servers of some arms, ended afterwards; the ends of their logs are printed if
        what was done with them fails."""
        fleet = Fleet(arms, self.checkpoint(model), flags, self.out / "logs" / label)
        try:
            fleet.start(min(_START_S[self.options.device], max(1.0, self.left_s())))
            yield fleet
        except Exception:
            print(fleet.tails(), flush=True)
            raise
        finally:
            fleet.stop()

    def part(self, step: Step, fleet: Fleet, title: str, do: Callable[[], None]) -> None:
        """A part of a step, whose failure does not keep the next one from being measured."""
        print(f"--- {title}: {self.left_s():.0f} s left", flush=True)
        try:
            do()
        except Exception as error:
            traceback.print_exc()
            print(fleet.tails(), flush=True)
            step.wrong.append(f"{title}: {type(error).__name__}: {error}"[:4000])
        self.write()

    def _make_ahead(self, names: list[str]) -> None:
        """Begin large checkpoints, one after the other, in a process beside the first step."""
        large = [name for step, name in LARGE.items() if step in names]
        if self.options.device == "cuda" and large:
            script = Path(serve_checkpoints.__file__)
            folder = ["--folder", str(self._checkpoints)]
            for name in large:
                with (self.out / f"checkpoint-{name}.log").open("wb") as log:
                    self._making[name] = subprocess.Popen(
                        [sys.executable, str(script), name, *folder],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )

    def _step(self, name: str, do: Callable[[Bench, Step], None]) -> None:
        step = self.steps[name] = Step()
        begin = time.monotonic()
        print(f"=== {name}: {self.left_s():.0f} s left", flush=True)
        if self.left_s() < _LEAST_S:
            step.status = "skipped"
        else:
            try:
                do(self, step)
            except Exception as error:
                traceback.print_exc()
                step.status = "broken"
                step.wrong.append(f"{type(error).__name__}: {error}"[:4000])
            else:
                step.status = "failed" if step.wrong else "ok"
        step.seconds = time.monotonic() - begin
        self.write()

    def write(self) -> None:
        tables = {
            f"{name}: {title}": rows
            for name, step in self.steps.items()
            for title, rows in step.tables.items()
        }
        told = {
            "part": "serve",
            "headline": ", ".join(f"{name} {step.status}" for name, step in self.steps.items()),
            "machine": machine(),
            "tables": tables,
            "figures": {
                "hardware": asdict(self.hardware),
                **{name: _told(step) for name, step in self.steps.items()},
            },
        }
        unfinished = self.out / "serve.json.part"
        unfinished.write_text(json.dumps(told, indent=1) + "\n")
        unfinished.replace(self.out / "serve.json")

    def _print(self) -> None:
        for name, step in self.steps.items():
            for title, rows in step.tables.items():
                print(f"\n{name}: {title}\n{aligned(rows)}")
        print()
        for name, step in self.steps.items():
            print(f"{name}: {step.status} in {step.seconds:.0f} s")
            for wrong in step.wrong:
                print(f"    {wrong.splitlines()[0][:200]}")
        sys.stdout.flush()


def _told(step: Step) -> dict[str, Any]:
    return {name: value for name, value in asdict(step).items() if name != "tables"}


def _roomy() -> Path:
    """Memory, where the large checkpoints fit, else the disk."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    return memory if room > _LARGE_BYTES else Path(tempfile.gettempdir())


def _check_package() -> None:
    """SGLang finds the package by its entry points: without them every arm would be in-tree.

    Raises:
        SystemExit: it is not installed.
    """
    found = [one.value for one in entry_points(group="sglang.srt.plugins")]
    if not any(value.startswith("sglang_epd") for value in found):
        sys.exit(f"sglang-epd is not installed beside SGLang; its plug-ins are {found}")


def parity(bench: Bench, step: Step, *, dtype: str) -> None:
    """Both tiny families, one after the other."""
    hardware = bench.hardware
    if dtype == "float32":
        # As near as can be: one server, too, resizes pictures on the CPU. And flash attention
        # has no float32.
        hardware = replace(
            hardware,
            attention=bench.options.attention_float32,
            tower_attention="sdpa",
            graphs=False,
            flags=f"{bench.options.flags} --image-processor-backend pil",
        )
    flags = hardware.of_servers(dtype, max_tokens=20_000)
    for model in ("tiny-3", "tiny-2.5"):
        arms = [one_server(caches=False), in_tree(), ours(to_tokenizer=True)]
        with bench.fleet(f"parity-{dtype}-{model}", arms, model, flags) as fleet:
            gaps = serve_parity.compare(fleet, bench.options.rounds, bench.left_s)
            wrong = [*serve_parity.verdict(gaps, dtype), *fleet.not_started]
        rows = step.tables[f"{model} in {dtype}"] = serve_parity.rows(gaps)
        print(aligned(rows), *wrong, sep="\n", flush=True)
        step.wrong += [f"{model}: {one}" for one in wrong]
        step.figures[model] = {
            "start_s": fleet.seconds,
            "not_started": fleet.failures,
            "gaps": {name: one.figures for name, one in gaps.items()},
        }
        bench.write()


def ttft(bench: Bench, step: Step, *, model: str) -> None:
    """Time to the first token, and at the end the encoder that is killed."""
    on_cpu = bench.options.device == "cpu"
    sizes = ("448",) if on_cpu else ("1080p", "448")
    cells = [Cell(images, size) for size in sizes for images in (4, 1)]
    arms = [one_server(caches=True), in_tree(), ours()]
    flags = bench.hardware.of_servers("bfloat16", max_tokens=18_000)
    checkpoint = "tiny-3" if on_cpu else model
    with bench.fleet(f"ttft-{model}", arms, checkpoint, flags) as fleet, GpuWatch() as watch:
        step.wrong += fleet.not_started
        figures = step.figures
        figures |= {"start_s": fleet.seconds, "not_started": fleet.failures}
        measured = serve_ttft.Measured()
        loads: list[serve_ttft.Load] = []

        def one_at_a_time() -> None:
            nonlocal measured
            seconds = min(_ALONE_S, 0.4 * bench.left_s())
            measured = serve_ttft.alone(fleet, cells, bench.options.repeats, seconds)
            step.wrong += measured.failures
            step.tables["one at a time"] = serve_ttft.summary(fleet, cells, measured)
            for cell in cells:
                step.tables[f"owners, {cell}"] = serve_ttft.owners(fleet, cell, measured)
            figures["alone_ms"] = measured.plain()
            figures["memory_mib"] = watch.memory_mib()

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
            start_s = min(_START_S[bench.options.device], max(1.0, bench.left_s()))
            rows, wrong = kill(fleet, cells[0], start_s)
            step.tables["encoder killed"] = rows
            step.wrong += wrong

        bench.part(step, fleet, "one at a time", one_at_a_time)
        if measured.samples:
            bench.part(step, fleet, "under load", under_load)
        bench.part(step, fleet, "by URL", by_url)
        bench.part(step, fleet, "metrics", fleet.keep_metrics)
        if "sglang-epd" in fleet.running and bench.left_s() > _LEAST_S:
            bench.part(step, fleet, "encoder killed", killed)


STEPS: dict[str, Callable[[Bench, Step], None]] = {
    "parity": lambda bench, step: parity(bench, step, dtype="bfloat16"),
    "ttft-8b": lambda bench, step: ttft(bench, step, model="8b"),
    "parity-float32": lambda bench, step: parity(bench, step, dtype="float32"),
    "ttft-7b": lambda bench, step: ttft(bench, step, model="7b"),
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
    parser.add_argument("--device", choices=_START_S, default="cuda")
    parser.add_argument("--attention", default="fa3", help="language models' backend")
    parser.add_argument("--attention-float32", default="torch_native")
    parser.add_argument("--tower-attention", default="", help="towers' backend, or SGLang's choice")
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs of decode")
    parser.add_argument("--flags", default="", help="of every server, after `=`")
    parser.add_argument("--rounds", type=int, default=6, help="of parity")
    parser.add_argument("--repeats", type=int, default=30, help="of requests one at a time")
    options = parser.parse_args()
    # Ends the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(Bench(options).run(options.steps))


if __name__ == "__main__":
    # Servers are asked on loopback.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    main()
