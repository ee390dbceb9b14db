"""What each pass of a tower took on the device, and a tower that has nothing to prepare."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_epd.encoder.tower import Prepared


@dataclass(frozen=True)
class Pass:
    """A forward pass.

    Attributes:
        pictures: in its batch.
        patches: of all of them.
        host_s: seconds that it took to be launched; on a CPU, to run.
        events: CUDA's, before its first kernel and after its last one.
    """

    pictures: int
    patches: int
    host_s: float
    events: tuple[Any, ...]

    @property
    def device_s(self) -> float:
        """Seconds on the device, launches that it had to wait for included; call it when the
        device has nothing to do."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else self.host_s


class Passes(list[Pass]):
    """All passes of a tower, in their order.

    Args:
        cuda: whether they run on CUDA's current stream.
    """

    def __init__(self, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.cuda:
            torch.cuda.synchronize()

    @contextmanager
    def timed(self, batch: Sequence[Prepared]) -> Iterator[None]:
        """Around a pass, in its thread and on its stream."""
        kinds = 2 if self.cuda else 0
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(kinds))
        began = time.perf_counter()
        for event in events[:1]:
            event.record()
        yield
        for event in events[1:]:
            event.record()
        took_s = time.perf_counter() - began
        self.append(Pass(len(batch), sum(one.patches for one in batch), took_s, events))


class ReadyTower:
    """A tower whose pictures are prepared beforehand: what the tower alone makes.

    Args:
        tower: that runs them.
        made: pictures, again and again.
    """

    alive = True

    def __init__(self, tower: Any, made: Sequence[Prepared]) -> None:
        # As many as a batch could want: preparing costs nothing here.
        self.preparers = 1024
        self.depth: int = tower.depth
        self._tower = tower
        self._made = itertools.cycle(made)

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        one = next(self._made)
        return Prepared(one.layout, one.patches, one.group, one.content)

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        made: list[torch.Tensor] = await self._tower.forward(batch)
        return made

    def discard(self, prepared: Prepared) -> None:
        pass
