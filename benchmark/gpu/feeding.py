"""Feeds the encoder's stages in a closed loop, and says where the time went."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from gpu.towers import Passes
from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.observability.encoder import EncoderMetrics

_FIRST_S = 60.0
_keys = itertools.count()


@dataclass(frozen=True)
class Fed:
    """What came of a run.

    Attributes:
        rate: pictures a second.
        busy: share of the time in which a pass was on the device.
        batch: pictures in a pass.
        patches: in a pass.
        launch_ms: that the host took for a pass.
        device_ms: that the device took for a pass, and waited in it.
        host_ms: processor time a picture, by thread, in milliseconds.
    """

    rate: float
    busy: float
    batch: float
    patches: float
    launch_ms: float
    device_ms: float
    host_ms: dict[str, float]


async def feed(
    tower: Any,
    passes: Passes,
    bounds: BatchBounds,
    *,
    pictures: Sequence[bytes],
    outstanding: int,
    seconds: float,
) -> Fed:
    """Ask for embeddings, always so many at a time, for some seconds after the first batches.

    Args:
        tower: an `encoder.tower.Tower`.
        passes: the tower's `Passes`.
        bounds: on a batch.
        pictures: encoded; each is a new one to the cache, however often it comes.
        outstanding: askers.
        seconds: measured.

    Raises:
        EpdError: an embedding could not be made.
    """
    computations = Computations(
        [tower],
        EmbeddingCache(0),
        EncoderMetrics(),
        batch=bounds,
        staged_bytes=4 << 30,
    )
    done = 0
    over = False
    turn = itertools.cycle(pictures)

    async def ask() -> None:
        nonlocal done
        while not over:
            number = next(_keys)
            key, owner = number.to_bytes(16, "big"), f"request {number}"
            deadline = time.monotonic() + 600.0
            hold = computations.hold(key, "IMAGE", next(turn), owner, deadline)
            try:
                await hold.embedding()
            finally:
                hold.release()
            done += 1

    async with asyncio.TaskGroup() as askers:
        for _ in range(outstanding):
            askers.create_task(ask())
        began = time.monotonic()
        # A round of all askers: buffers are as large as they become, and queues as full.
        while done < outstanding and time.monotonic() < began + _FIRST_S:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        first, made, since, cpu = len(passes), done, time.monotonic(), processor_s()
        await asyncio.sleep(seconds)
        counted, made, wall_s = passes[first:], done - made, time.monotonic() - since
        cpu = {name: spent - cpu.get(name, 0.0) for name, spent in processor_s().items()}
        over = True
    await computations.close()
    passes.wait()
    count = max(len(counted), 1)
    return Fed(
        rate=made / wall_s,
        busy=sum(one.device_s for one in counted) / wall_s,
        batch=sum(one.pictures for one in counted) / count,
        patches=sum(one.patches for one in counted) / count,
        launch_ms=1e3 * sum(one.host_s for one in counted) / count,
        device_ms=1e3 * sum(one.device_s for one in counted) / count,
        host_ms={name: 1e3 * spent / max(made, 1) for name, spent in cpu.items()},
    )


def processor_s() -> dict[str, float]:
    """Processor seconds so far, by kind of thread, and of all children together."""
    me = psutil.Process()
    names = {
        one.native_id: one.name.split("_")[0].removesuffix("-0") for one in threading.enumerate()
    }
    spent: dict[str, float] = collections.defaultdict(float)
    for thread in me.threads():
        # Others are OpenMP's, the driver's and autograd's.
        name = names.get(thread.id, "other")
        spent["loop" if name == "MainThread" else name] += thread.user_time + thread.system_time
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent["decoding children"] += sum(child.cpu_times()[:2])
    return dict(spent)


class Sampler:
    """Looks every few milliseconds at what each thread of this process executes.

    A thread that waits in a system call or a kernel launch counts where it waits; what does
    not hold the interpreter's lock is seen as well as what does.
    """

    def __init__(self, every_s: float = 0.005) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sampler")
        self.counts: dict[str, collections.Counter[str]] = {}
        self.looks = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            names = {one.ident: one.name.split("_")[0] for one in threading.enumerate()}
            self.looks += 1
            for ident, frame in sys._current_frames().items():
                name = names.get(ident, "?")
                if name == "sampler":
                    continue
                code = frame.f_code
                file = "/".join(code.co_filename.split("/")[-2:])
                counter = self.counts.setdefault(name, collections.Counter())
                counter[f"{file}:{frame.f_lineno} {code.co_name}"] += 1
