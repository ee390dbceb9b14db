"""How fast a vision tower encodes behind this package's stages, and what holds it up.

    python benchmark/gpu/tower.py [--shape qwen2.5-vl-7b] [--arms few] [--json FILE]

The tower is SGLang's own behind the encoder server's engine, in a released model's shape with
random weights. In front of it are the stages of the encoder server (`encoder.pipeline`), behind
it the server's copies to the host (`CopyOut`). Askers wait for embeddings in a closed loop. All
arms take turns, in as many rounds as there is time for; figures are medians over the rounds.
`--arms graphs` has the tower capture CUDA graphs of its passes.

`ready` arms get pictures that are prepared beforehand: what the tower and the copies make.
The others decode in children and preprocess in threads, as the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

if not __package__:  # a program; in the tests encoder.py there would hide theirs
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu.arms import SIZES, Arm, arms_of, best_rates, fed_rows, headline, host_rows, pass_rows
from gpu.feeding import Fed, Sampler, feed
from gpu.results import Results, arguments
from gpu.shapes import SHAPES
from gpu.towers import ReadyTower
from sglang_epd.encoder.memory import keep_freed, keep_large_apart
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.tower import Prepared

_PICTURES = 16
_READY = 4
_DECODE_BYTES = 4 << 30
# That one of them takes, nearly all for the tables of operators.
_PROFILE_S = 15.0
_AHEAD_MS = 100
# Of any GPU, at least: what takes longer is hidden too.
_CYCLES_A_MS = 2_000_000
_COUNTS = {"448": (1, 2, 4, 8, 16, 32), "224": (1, 32, 64), "1080p": (1, 2, 4)}


class Bench:
    """Runs arms over one tower's module.

    Args:
        source: a `TimedEngine`.
        device: "cuda" or "cpu".
        tiny: tenths of seconds.
    """

    def __init__(self, source: Any, device: str, *, tiny: bool) -> None:
        self.cuda = device == "cuda"
        self.source = source
        self._tiny = tiny
        self._seconds = 0.3 if tiny else 1.2
        self._pictures: dict[str, list[bytes]] = {}
        self._ready: dict[tuple[str, bool], list[Prepared]] = {}

    def pictures(self, size: str) -> list[bytes]:
        if size not in self._pictures:
            count = 4 if self._tiny else _PICTURES
            self._pictures[size] = [made_jpeg(SIZES[size], seed) for seed in range(count)]
        return self._pictures[size]

    def ready(self, size: str, *, pinned: bool) -> list[Prepared]:
        if (size, pinned) not in self._ready:
            self.source.pin(pinned)
            pictures = self.pictures(size)[:_READY]
            self._ready[size, pinned] = [self.source.prepared(data) for data in pictures]
        return self._ready[size, pinned]

    def run(self, arm: Arm, seconds: float | None = None) -> Fed:
        """One run."""
        ready = self.ready(arm.size, pinned=arm.pinned)
        self.source.pin(arm.pinned)
        (keep_freed if arm.kept else keep_large_apart)()
        tower = self.source.tower(max(arm.preparers, 1), arm.torch_threads, arm.depth)
        batch = max(1, min(arm.items, arm.patches // ready[0].patches))
        return asyncio.run(
            feed(
                tower if arm.preparers else ReadyTower(tower, ready),
                tower.passes,
                BatchBounds(arm.patches, arm.items),
                pictures=self.pictures(arm.size),
                outstanding=min(max(4 * batch, 2 * arm.preparers, 8), 512),
                seconds=seconds or self._seconds,
            )
        )

    def one_pass(self, size: str, count: int) -> dict[str, float]:
        """A pass of `count` pictures alone: milliseconds to launch it, and on the device.

        Before the pass the device is given something to do for long enough that all of the
        pass is launched when the pass begins: what the device then takes is for its kernels.
        """
        made = [self.source.on_device(one) for one in self.ready(size, pinned=True)]
        batch = [made[at % len(made)] for at in range(count)]
        cuda = self.cuda
        launches: list[float] = []
        hidden: list[float] = []
        queued: list[float] = []
        alone: list[float] = []
        for attempt in range(3 if self._tiny else 7):
            ahead = cuda and attempt % 2 == 1
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
            if cuda:
                torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(int(_AHEAD_MS * _CYCLES_A_MS))
            began = time.perf_counter()
            for event in events[:1]:
                event.record()
            self.source.run_on_device(batch)
            took_ms = (time.perf_counter() - began) * 1e3
            for event in events[1:]:
                event.record()
            if cuda:
                torch.cuda.synchronize()
            if attempt == 0:
                continue  # the first of a shape chooses its kernels
            device_ms = events[0].elapsed_time(events[1]) if cuda else took_ms
            (queued if ahead or not cuda else alone).append(device_ms)
            (hidden if ahead else launches).append(took_ms)
        return {
            "pictures": count,
            "patches": sum(one.patches for one in batch),
            "launch_ms": statistics.median(launches),
            "kernels_ms": statistics.median(queued),
            "alone_ms": statistics.median(alone or queued),
            # A pass that waits for the device cannot be launched ahead.
            "waits": bool(hidden) and min(hidden) > _AHEAD_MS / 2,
        }


def made_jpeg(size: tuple[int, int], seed: int) -> bytes:
    """A picture with the detail of a photograph, at coarse and fine scales; needs no files."""
    draw = np.random.default_rng(seed)
    width, height = size
    levels = np.full((height, width, 3), 128.0, np.float32)
    for scale, strength in ((4, 60), (16, 30), (64, 14), (256, 7)):
        shape = (min(scale, height), min(scale, width), 3)
        coarse = Image.fromarray(draw.integers(0, 256, shape, np.uint8))
        levels += (np.asarray(coarse.resize(size), np.float32) - 128.0) * (strength / 128)
    file = io.BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def profile(bench: Bench, arm: Arm) -> dict[str, Any]:
    """Where the host's time goes in one arm: threads' stacks, and torch's operators."""
    with Sampler() as sampler:
        bench.run(arm)
    stacks = {
        name: [[place, round(count / sampler.looks, 3)] for place, count in counts.most_common(8)]
        for name, counts in sampler.counts.items()
    }
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    from torch._C._profiler import _ExperimentalConfig

    profiler = torch.profiler.profile(
        activities=activities,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    with profiler:
        fed = bench.run(arm, 0.3)
    averages = profiler.key_averages()
    top = averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    print(top, flush=True)
    device = averages.table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60)
    if bench.cuda:
        print(device, flush=True)
    return {"arm": arm.name, "stacks": stacks, "operators": top, "profiled": asdict(fed)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--shape", choices=list(SHAPES), default=next(iter(SHAPES)))
    parser.add_argument("--arms", choices=("all", "few", "graphs"), default="all")
    parser.add_argument("--flags", default="", help="of SGLang's server, after `=`")
    options = parser.parse_args()
    shape = "tiny-qwen3-vl" if options.tiny else options.shape
    if options.arms == "graphs":
        os.environ["SGLANG_VIT_ENABLE_CUDA_GRAPH"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        from gpu.engines import load

        dtype = "bfloat16" if options.device == "cuda" else "float32"
        flags = ["--dtype", dtype, *options.flags.split()]
        source = load(shape, Path(folder), _DECODE_BYTES, *flags)
        measure(source, shape, options)
        asyncio.run(source.close())
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads stay


def measure(source: Any, shape: str, options: argparse.Namespace) -> None:
    """All of it, within the minutes."""
    end = time.monotonic() + 60 * options.minutes
    bench = Bench(source, options.device, tiny=options.tiny)
    results = Results(f"tower of sglang, {shape}")
    results.figures = {"shape": shape, "attention": source.attention}
    which = "tiny" if options.tiny else options.arms
    passes = results.figures["passes"] = []
    for size, counts in ({"56": (1, 2)} if options.tiny else _COUNTS).items():
        passes += [{"size": size, **bench.one_pass(size, count)} for count in counts]
        results.tables["One pass alone"] = pass_rows(passes)
        results.write(options.json)

    runs: dict[Arm, list[Fed]] = {arm: [] for arm in arms_of(which)}
    rounds_end, longest_s = end - (0 if options.tiny else _PROFILE_S), 0.0
    for _ in range(1 if options.tiny else 5):
        for arm, fed in runs.items():
            begin = time.monotonic()
            if begin + longest_s > rounds_end:
                break
            fed.append(bench.run(arm))
            longest_s = max(longest_s, time.monotonic() - begin)
            print(f"{arm.name}: {fed[-1].rate:.1f} images/s", flush=True)
            _tell(results, {one: several for one, several in runs.items() if several})
            results.write(options.json)
    served = [Arm("448", 8, 2)]
    for arm in [Arm("56", 1, 1, patches=512)] if options.tiny else served:
        if options.tiny or time.monotonic() < end - _PROFILE_S:
            results.figures.setdefault("profiles", []).append(profile(bench, arm))
            results.write(options.json)
    results.print()


def _tell(results: Results, runs: dict[Arm, list[Fed]]) -> None:
    results.figures["runs"] = [
        {"arm": asdict(arm), "name": arm.name, "runs": [asdict(one) for one in fed]}
        for arm, fed in runs.items()
    ]
    results.tables["Through the encoder's stages"] = fed_rows(
        runs, best_rates(results.figures["passes"])
    )
    results.tables["Processor milliseconds a picture"] = host_rows(runs)
    results.headline = headline(runs)


if __name__ == "__main__":
    main()
