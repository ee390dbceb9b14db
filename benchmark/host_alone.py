"""An encoder's engine without a server: its steps, and what keeps a tower busy.

`floor` times what every encoder has to do with a picture. `keep_busy` has threads and
processes prepare pictures in turns for a tower that is emulated. A pass is launched by small
operators of torch, a millisecond of the interpreter for each picture, and then holds the device
for 2.5 ms a picture. So pictures of 448 px find there what they find on an H100 with the tower
of Qwen3-VL-8B: passes that are launched under the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from encoder_arms import load
from gpu.feeding import feed
from gpu.towers import Pass, Passes
from pictures import jpeg

DEVICE_S = 2.5e-3
LAUNCH_S = 1e-3
STEPS = ("decode", "resize and patches", "normalise", "tower")
_REPEATS = 12
WAYS = ("threads", "processes")
_OUTSTANDING = 64
_PICTURES = 32


class Kept(msgspec.Struct, frozen=True):
    """A closed loop of pictures of one size.

    Attributes:
        way: of WAYS, by which they were prepared.
        rate: pictures a second.
        busy: share of the time in which the device had a pass.
        launch_ms: a picture, of which `LAUNCH_S` is the thread's own work.
        host_ms: processor time a picture, of all threads and children.
    """

    way: str
    size: str
    rate: float
    busy: float
    launch_ms: float
    host_ms: float


def floor(pipe: Connection, model: str, flags: str, log: str) -> None:
    """Times what every encoder has to do, one picture after the other."""
    engine = _engine(model, flags, log)
    from PIL import Image
    from transformers import AutoImageProcessor

    from sglang_epd.encoder.model.features import mark

    processor = AutoImageProcessor.from_pretrained(model)
    found = {}
    for size in ("448", "1080p"):
        spent: dict[str, list[float]] = defaultdict(list)
        for number in range(_REPEATS):
            data = jpeg(size, ("floor", number))
            begin = time.process_time()
            picture = Image.open(io.BytesIO(data))
            picture.load()
            decoded = time.process_time()
            processor(images=[picture], return_tensors="pt", do_normalize=False, do_rescale=False)
            cut = time.process_time()
            processor(images=[picture], return_tensors="pt")
            whole = time.process_time() - cut
            prepared = mark(engine._preparer.preprocess("IMAGE", picture), engine._device)
            ready = time.process_time()
            asyncio.run(engine.forward([prepared]))
            ran = time.process_time() - ready
            made = (decoded - begin, cut - decoded, whole - (cut - decoded), ran)
            for step, seconds in zip(STEPS, made, strict=True):
                spent[step].append(1e3 * seconds)
        found[size] = {step: statistics.median(values) for step, values in spent.items()}
    pipe.send(found)


def keep_busy(
    pipe: Connection, model: str, flags: str, log: str, *, rounds: int, seconds: float
) -> None:
    """Sends a list of `Kept`, the ways in turns."""
    pipe.send(asyncio.run(_keep_busy(_engine(model, flags, log), rounds, seconds)))


def _engine(model: str, flags: str, log: str) -> Any:
    with open(log, "ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ["SGLANG_PLUGINS"] = "sglang_epd_cpu"
    return load(model, *shlex.split(flags))


async def _keep_busy(engine: Any, rounds: int, seconds: float) -> list[Kept]:
    from sglang_epd.encoder.pipeline.scheduling import BatchBounds

    tower = _emulated(engine)
    patches, found = engine._preparer.patches, []
    for size in ("448", "1080p"):
        pictures = [jpeg(size, number) for number in range(_PICTURES)]
        for number in range(rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                engine._preparer.patches = patches if way == "processes" else None
                fed = await feed(
                    tower,
                    tower.passes,
                    BatchBounds(16_384, 32),
                    pictures=pictures,
                    outstanding=_OUTSTANDING,
                    seconds=seconds,
                )
                launch_ms = fed.launch_ms / fed.batch
                host_ms = sum(fed.host_ms.values())
                found.append(Kept(way, size, fed.rate, fed.rate * DEVICE_S, launch_ms, host_ms))
    await engine.close()
    return found


def _emulated(engine: Any) -> Any:
    """The engine as a tower whose passes are emulated."""
    import torch

    from sglang_epd.encoder.tower import Prepared

    small = torch.zeros(8)

    def operators(count: int) -> float:
        began = time.thread_time()
        for _ in range(count):
            small.add(1.0)
        return time.thread_time() - began

    many = 5000
    each = round(many * LAUNCH_S / min(operators(many) for _ in range(5)))

    class Emulated(type(engine)):  # type: ignore[misc]
        passes = Passes(cuda=False)
        depth = 2
        free_at = 0.0

        async def _forward_once(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
            loop = asyncio.get_running_loop()
            done_at = await loop.run_in_executor(self._tower, self._launch, batch)
            await asyncio.sleep(max(0.0, done_at - time.monotonic()))
            layouts = [prepared.layout.embedding for prepared in batch]
            return [torch.empty(one.shape, dtype=torch.bfloat16) for one in layouts]

        def _launch(self, batch: Sequence[Prepared]) -> float:
            began = time.monotonic()
            operators(each * len(batch))
            now = time.monotonic()
            patches = sum(one.patches for one in batch)
            self.passes.append(Pass(len(batch), patches, now - began, ()))
            self.free_at = max(self.free_at, now) + DEVICE_S * len(batch)
            return self.free_at

    engine.__class__ = Emulated
    return engine


def kept_rows(kept: Sequence[Kept]) -> list[list[str]]:
    """A table of medians of rounds."""
    rows = [["size", "prepared in", "images/s", "busy", "launch ms", "processor ms"]]
    for size, way in itertools.product(dict.fromkeys(one.size for one in kept), WAYS):
        some = [one for one in kept if (one.size, one.way) == (size, way)]
        rate, busy, launch, host = (
            statistics.median(getattr(one, name) for one in some)
            for name in ("rate", "busy", "launch_ms", "host_ms")
        )
        rows.append([size, way, f"{rate:.0f}", f"{busy:.0%}", f"{launch:.1f}", f"{host:.1f}"])
    return rows
