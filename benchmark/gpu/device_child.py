"""A process of test_device.py that may spoil its own use of the device.

python benchmark/gpu/device_child.py assert            # ends with status 3
python benchmark/gpu/device_child.py capture beside|alone
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import torch

from sglang_epd.device import device_of
from sglang_epd.device.cuda import capture_beside_other_threads
from sglang_epd.encoder.breakage import Breakage
from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.tower import TowerBrokenError


async def fail_on_the_device() -> None:
    """A pass whose indices are beyond its table, which the device asserts."""
    device = device_of("cuda", 0)
    copies = CopyOut(device)
    table = torch.ones(8, 4, device=device.name)
    device.synchronize()

    async def probe() -> None:
        device.empty_cache()
        await asyncio.to_thread(device.synchronize)

    breakage = Breakage(probe, pause_s=0.1)

    def run(index: torch.Tensor) -> list[torch.Tensor]:
        return copies.land(copies.launch(lambda: table[index.to(device.name)]), [len(index)])

    try:
        await breakage.watch(asyncio.to_thread(run, torch.ones(2, 2, 2, 2, 2)))
    except IndexError:
        print("broken" if breakage.reason else "sound after a mistake of the item", flush=True)
    assert (await breakage.watch(asyncio.to_thread(run, torch.tensor([1]))))[0].shape == (1, 4)
    try:
        await breakage.watch(asyncio.to_thread(run, torch.tensor([1, 100])))
    except TowerBrokenError as error:
        print(f"broken: {error}", flush=True)
        os._exit(3)  # as a worker does: an ordinary end frees device memory, which would fail


def capture() -> None:
    """Graphs, while other threads copy, allocate and wait on streams of their own."""
    device = device_of("cuda", 0)
    given = torch.ones(1000, 1000, device=device.name)
    over = threading.Event()
    failures: list[BaseException] = []

    def use() -> None:
        try:
            stream = device.stream()
            made = torch.ones(1000, 1000, device=device.name)
            while not over.is_set():
                with device.use(stream):
                    more = torch.empty(3000, 3000, device=device.name)
                there = device.pinned(made.nbytes).view(made.dtype).view(made.shape)
                copied = device.copy(made, there, stream)
                copied.query()
                copied.synchronize()
                del more
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = given
            for _ in range(300):
                made = made + 1
        graph.replay()
        assert bool((made == 301).all())
    over.set()
    for thread in threads:
        thread.join(10)
    if failures:
        raise failures[0]


if __name__ == "__main__":
    if sys.argv[1] == "assert":
        asyncio.run(fail_on_the_device())
    else:
        if sys.argv[2] == "beside":
            capture_beside_other_threads()
        capture()
