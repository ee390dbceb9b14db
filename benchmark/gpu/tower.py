"""How fast a vision tower encodes behind this package's stages, and what holds it up.

    python benchmark/gpu/tower.py [--shapes qwen3-vl-8b qwen2.5-vl-7b] [--minutes 4] [--json FILE]

The tower is that of `transformers`, in a released model's shape with random weights. In front
of it are the stages of the encoder server (`encoder.pipeline`), behind it the server's copies
to the host (`CopyOut`). Askers wait for embeddings in a closed loop. All arms take turns, in
as many rounds as there is time for; figures are medians over the rounds.

`ready` arms get pictures that are prepared beforehand: what the tower and the copies make.
`jpeg` arms decode in children and preprocess in threads, as the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.feeding import Fed, Sampler, feed
from gpu.results import Results, arguments
from gpu.towers import ReadyTower, TransformersTower, prepared_of
from gpu.vision import SHAPES, Vision
from sglang_epd.decoding import Decoders
from sglang_epd.encoder.pipeline.scheduling import Bounds
from sglang_epd.media import MediaLimits

SIZES = {"56": (56, 56), "224": (224, 224), "448": (448, 448), "1080p": (1920, 1080)}
_PICTURES = 16
_READY = 4
_MOST_PREPARERS = 32


@dataclass(frozen=True)
class Arm:
    """A way to feed a tower.

    Attributes:
        shape: of the tower.
        size: of the pictures.
        preparers: 0: the pictures are prepared beforehand.
        torch_threads: that torch uses for one picture; 0: as many as it likes.
        patches: in a batch at most.
        items: in a batch at most.
        depth: passes in flight.
    """

    shape: str
    size: str
    preparers: int = 0
    torch_threads: int = 0
    patches: int = 16_384
    items: int = 256
    depth: int = 2

    @property
    def name(self) -> str:
        threads = f" of {self.torch_threads} torch threads" if self.torch_threads else ""
        how = f"{self.preparers} preparers{threads}" if self.preparers else "ready"
        return f"{self.size} px, {how}"


def arms_of(shape: str, tiny: bool) -> list[Arm]:
    """What is compared of a shape; all of the first one, less of others."""
    if tiny:
        some = [Arm(shape, "56", patches=1024, items=items) for items in (4, 16)]
        return [*some, Arm(shape, "56", preparers=2, torch_threads=1, patches=1024, depth=1)]
    budgets = [Arm(shape, "448", patches=patches) for patches in (4096, 8192, 16_384, 32_768)]
    budgets += [Arm(shape, "1080p", patches=patches) for patches in (8192, 16_384, 32_768)]
    if shape != next(iter(SHAPES)):
        jpegs = [Arm(shape, size, 16, 1) for size in ("448", "1080p")]
        return [*budgets[1:3], *budgets[5:6], *jpegs]
    items = [Arm(shape, "224", items=items) for items in (32, 64, 128)]
    depths = [Arm(shape, size, depth=1) for size in ("448", "1080p")]
    jpegs = [Arm(shape, "448", preparers, 1) for preparers in (1, 2, 4, 8, 16, 24)]
    jpegs += [Arm(shape, "1080p", preparers, 1) for preparers in (2, 4, 8, 16)]
    jpegs += [Arm(shape, "224", preparers, 1) for preparers in (4, 16)]
    jpegs += [Arm(shape, size, preparers) for size in ("448", "1080p") for preparers in (4, 16)]
    return [*budgets, *items, *depths, *jpegs]


class Bench:
    """Runs arms in turns.

    Args:
        device: "cuda" or "cpu".
        tiny: seconds of hundredths.
    """

    def __init__(self, device: str, *, tiny: bool) -> None:
        self.device = device
        self.tiny = tiny
        self._seconds = 0.3 if tiny else 1.5
        self._visions: dict[str, Vision] = {}
        self._pictures: dict[str, list[bytes]] = {}
        self._ready: dict[tuple[str, str], list[Any]] = {}
        self.decoders = Decoders(MediaLimits(), 4 << 30, _MOST_PREPARERS)
        self.decoders.start()

    def vision(self, shape: str) -> Vision:
        if shape not in self._visions:
            self._visions[shape] = Vision(SHAPES[shape], self.device)
        return self._visions[shape]

    def pictures(self, size: str) -> list[bytes]:
        if size not in self._pictures:
            count = 4 if self.tiny else _PICTURES
            self._pictures[size] = [made_jpeg(SIZES[size], seed) for seed in range(count)]
        return self._pictures[size]

    def ready(self, shape: str, size: str) -> list[Any]:
        if (shape, size) not in self._ready:
            vision = self.vision(shape)
            pictures = [Image.open(io.BytesIO(data)) for data in self.pictures(size)[:_READY]]
            made = [prepared_of(vision, *vision.prepare(picture)) for picture in pictures]
            self._ready[shape, size] = made
        return self._ready[shape, size]

    def run(self, arm: Arm, watch: Callable[[], Any] | None = None) -> Fed:
        """One run; `watch` gives a context around it."""
        torch_threads = arm.torch_threads or None
        preparers = arm.preparers or 1
        tower = TransformersTower(
            self.vision(arm.shape), self.decoders, preparers, torch_threads, arm.depth
        )
        fed_by: Any = tower
        if not arm.preparers:
            fed_by = ReadyTower(tower, self.ready(arm.shape, arm.size))
        bounds = Bounds(arm.patches, arm.items)
        patches = self.ready(arm.shape, arm.size)[0].patches
        batch = max(1, min(arm.items, arm.patches // patches))
        outstanding = min(max(4 * batch, 2 * arm.preparers, 8), 512)
        feeding = feed(
            fed_by,
            tower.passes,
            bounds,
            pictures=self.pictures(arm.size),
            outstanding=outstanding,
            seconds=self._seconds,
        )
        try:
            if watch is None:
                return asyncio.run(feeding)
            with watch():
                return asyncio.run(feeding)
        finally:
            tower.close()

    def one_pass(self, shape: str, size: str, count: int) -> dict[str, float]:
        """A pass of `count` pictures alone: milliseconds to launch it, and on the device.

        Before the pass the device is given something to do for long enough that all of the
        pass is launched when the pass begins: what the device then takes is for its kernels.
        """
        vision = self.vision(shape)
        made = self.ready(shape, size)
        batch = [made[at % len(made)] for at in range(count)]
        features = [one.content.to(vision.device) for one in batch]
        grids = [one.layout.grid for one in batch]
        cuda = self.device == "cuda"
        launches: list[float] = []
        queued: list[float] = []
        alone: list[float] = []
        for attempt in range(3 if self.tiny else 7):
            ahead = cuda and attempt % 2 == 1
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
            if cuda:
                torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(200_000_000)  # a tenth of a second
            began = time.perf_counter()
            for event in events[:1]:
                event.record()
            vision.run(features, grids)
            took_ms = (time.perf_counter() - began) * 1e3
            for event in events[1:]:
                event.record()
            if cuda:
                torch.cuda.synchronize()
            if attempt == 0:
                continue  # the first of a shape chooses its kernels
            device_ms = events[0].elapsed_time(events[1]) if cuda else took_ms
            (queued if ahead or not cuda else alone).append(device_ms)
            launches.append(took_ms)
        return {
            "pictures": count,
            "patches": sum(one.patches for one in batch),
            "launch_ms": statistics.median(launches),
            "kernels_ms": statistics.median(queued),
            "alone_ms": statistics.median(alone or queued),
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
    if bench.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    from torch._C._profiler import _ExperimentalConfig

    profiler = torch.profiler.profile(
        activities=activities,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    fed = bench.run(arm, lambda: profiler)
    averages = profiler.key_averages()
    top = averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60)
    print(top, flush=True)
    device = averages.table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60)
    if bench.device == "cuda":
        print(device, flush=True)
    return {"arm": arm.name, "stacks": stacks, "operators": top, "profiled": asdict(fed)}


def fed_rows(runs: dict[Arm, list[Fed]]) -> list[list[str]]:
    """A row for each arm: medians of its runs."""
    head = "tower, pictures, patches, items, depth, images/s, low to high, busy, a pass"
    rows = [[*head.split(", "), "launch ms", "device ms", "host ms/image"]]
    for arm, fed in runs.items():

        def median(name: str, fed: list[Fed] = fed) -> float:
            return statistics.median(getattr(one, name) for one in fed)

        rates = [one.rate for one in fed]
        host = statistics.median(sum(one.host_ms.values()) for one in fed)
        row = [arm.shape, arm.name, str(arm.patches), str(arm.items), str(arm.depth)]
        row += [f"{median('rate'):.1f}", f"{min(rates):.1f} to {max(rates):.1f}"]
        row += [f"{median('busy'):.0%}", f"{median('batch'):.1f}", f"{median('launch_ms'):.1f}"]
        row += [f"{median('device_ms'):.1f}", f"{host:.1f}"]
        rows.append(row)
    return rows


def host_rows(runs: dict[Arm, list[Fed]]) -> list[list[str]]:
    """Processor milliseconds a picture, by kind of thread."""
    names = sorted({name for fed in runs.values() for one in fed for name in one.host_ms})
    rows = [["tower", "pictures", *names]]
    for arm, fed in runs.items():
        spent = [statistics.median(one.host_ms.get(name, 0.0) for one in fed) for name in names]
        rows.append([arm.shape, arm.name, *(f"{ms:.2f}" for ms in spent)])
    return rows


def pass_rows(passes: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    rows = [["tower", "pictures", "patches", "launch ms", "kernels ms", "alone ms", "images/s"]]
    for name, made in passes.items():
        for one in made:
            figures = [f"{one[key]:.1f}" for key in ("launch_ms", "kernels_ms", "alone_ms")]
            rate = one["pictures"] / one["kernels_ms"] * 1e3
            rows.append(
                [name, f"{one['pictures']:.0f}", f"{one['patches']:.0f}", *figures, f"{rate:.0f}"]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES))
    options = parser.parse_args()
    began = time.monotonic()
    tiny = [name for name in SHAPES if name.startswith("tiny")]
    shapes = options.shapes or (tiny if options.tiny else [n for n in SHAPES if n not in tiny])
    bench = Bench(options.device, tiny=options.tiny)
    results = Results("tower")

    counts = {"448": (1, 2, 4, 8, 16, 32), "224": (1, 32, 64), "1080p": (1, 2, 4)}
    if options.tiny:
        counts = {"56": (1, 2)}
    passes: dict[str, list[dict[str, float]]] = {}
    for shape in shapes:
        for size, several in counts.items():
            some = several if shape == shapes[0] else several[-2:]
            made = passes.setdefault(f"{shape}, {size} px", [])
            made += [bench.one_pass(shape, size, count) for count in some]
    results.figures = {
        "attention": {shape: bench.vision(shape).attention for shape in shapes},
        "passes": passes,
    }
    results.tables["One pass alone"] = pass_rows(passes)
    results.write(options.json)

    arms = [arm for shape in shapes for arm in arms_of(shape, options.tiny)]
    runs: dict[Arm, list[Fed]] = {arm: [] for arm in arms}
    rounds_end = began + 60 * options.minutes * 0.85
    rounds, round_s, most = 0, 0.0, 1 if options.tiny else 5
    while rounds == 0 or (time.monotonic() + round_s < rounds_end and rounds < most):
        begin = time.monotonic()
        for arm in arms:
            if time.monotonic() > rounds_end:
                break
            runs[arm].append(bench.run(arm))
            print(f"{arm.shape} {arm.name}: {runs[arm][-1].rate:.1f} images/s", flush=True)
            done = {one: fed for one, fed in runs.items() if fed}
            results.figures["runs"] = [
                {"arm": asdict(one), "name": one.name, "runs": [asdict(fed) for fed in several]}
                for one, several in done.items()
            ]
            results.tables["Through the encoder's stages"] = fed_rows(done)
            results.tables["Processor milliseconds a picture"] = host_rows(done)
            results.headline = headline(done)
            results.write(options.json)
        rounds, round_s = rounds + 1, time.monotonic() - begin
    for size in ("56",) if options.tiny else ("448", "1080p"):
        if time.monotonic() < began + 60 * options.minutes:
            profiles = results.figures.setdefault("profiles", [])
            profiles.append(profile(bench, Arm(shapes[0], size, 16, 1)))
            results.write(options.json)
    bench.decoders.close()
    results.print()


def headline(runs: dict[Arm, list[Fed]]) -> str:
    """The best of the tower alone, and with decoding."""
    best: dict[tuple[str, str, bool], float] = {}
    for arm, fed in runs.items():
        key = (arm.shape, arm.size, bool(arm.preparers))
        best[key] = max(best.get(key, 0.0), statistics.median(one.rate for one in fed))
    return "; ".join(
        f"{shape} {size} px{' from JPEG' if jpeg else ''} {rate:.0f}/s"
        for (shape, size, jpeg), rate in best.items()
    )


if __name__ == "__main__":
    main()
