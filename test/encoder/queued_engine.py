"""As `real_towers`, with the engine on a device that takes work by streams, as CUDA does.

    python test/encoder/queued_engine.py OUT FLAG...

Writes to OUT also what the same engine makes without it: `plain/...`. Prints what it asked
of the device.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import real_towers

from sglang_epd.device import Host


class Queued(Host):
    """The CPU, whose work is done when a call returns, called as if it were not."""

    queues = True

    def __init__(self) -> None:
        super().__init__()
        self.bound: set[str] = set()
        self.fraction = 0.0
        self.calls: list[str] = []

    def bind(self) -> None:
        self.bound.add(threading.current_thread().name.partition("_")[0])

    def limit_memory(self, fraction: float) -> None:
        self.fraction = fraction

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def stream(self) -> Any:
        self.calls.append("stream")
        return super().stream()

    def copy(self, source: Any, destination: Any, stream: Any, waits: Any = ()) -> Any:
        self.calls.append("copy")
        return super().copy(source, destination, stream, waits)


DEVICE = Queued()


async def use(tower: Any, name: str) -> dict[str, np.ndarray]:
    from sglang.srt.distributed.parallel_state import get_world_group

    assert tower.depth == 2
    results = await _use(tower, name)
    print("bound", *sorted(DEVICE.bound))
    print("memory", DEVICE.fraction)
    print("switch", sys.getswitchinterval())
    print("calls", *dict.fromkeys(DEVICE.calls))
    print("groups", get_world_group().local_rank)
    tower._copies = None
    return results | await _use(tower, "plain")


_use = real_towers.use


if __name__ == "__main__":
    from sglang_epd.encoder.model import engine

    engine.device_of = lambda *_: DEVICE
    real_towers.use = use
    real_towers.main()
