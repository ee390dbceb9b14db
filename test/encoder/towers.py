"""A tower of fakes that can be held up, made to fail, killed and brought back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.work import Hold
from sglang_epd.encoder.tower import Prepared, TowerLostError
from sglang_epd.wire.messages import Layout, TensorSpec

WIDTH = 4
ROW_BYTES = 4 * WIDTH
PATIENCE_S = 5.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


def key_of(name: bytes) -> bytes:
    return name.ljust(32, b".")


async def value(hold: Hold) -> float:
    return float((await hold.embedding())[0, 0])


def states(computations: Computations) -> dict[str, int]:
    return {name: count for name, count in computations.status()["queue"].items() if count}


async def settle() -> None:
    """Let everything happen that needs no more than the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


class FakeTower:
    """Media are named by their bytes; the first letter is the group.

    Attributes:
        patches, rows: of an item, by its name.
        slow: items whose preparation waits for these events.
        bad: items that cannot be prepared, or make every batch fail that they are in.
        deadly: items that kill the tower when they are prepared, or run.
        revives: whether it is back at once.
        prepared, batches, discarded: what it did, by name.
        tell: of the last batch.
    """

    def __init__(self, preparers: int = 4) -> None:
        self.alive = True
        self.preparers = preparers
        self.depth = 1
        self.weights_bytes = 0
        self.patches: dict[bytes, int] = {}
        self.rows: dict[bytes, int] = {}
        self.slow: dict[bytes, asyncio.Event] = {}
        self.bad_media: dict[bytes, Exception] = {}
        self.bad_batch: dict[bytes, BaseException] = {}
        self.deadly_media: set[bytes] = set()
        self.deadly_batch: set[bytes] = set()
        self.revives = True
        self.preparations: list[bytes] = []
        self.batches: list[list[bytes]] = []
        self.discarded: list[bytes] = []
        self.preparing = 0
        self.running = 0
        self.deaths = 0
        self.in_memory: set[Prepared] = set()
        self._lost: set[Prepared] = set()
        self._prepare_gate = asyncio.Event()
        self._forward_gate = asyncio.Event()
        self._prepare_gate.set()
        self._forward_gate.set()
        self._death = asyncio.Event()

    def hold(self, *, prepare: bool = False, forward: bool = False) -> None:
        if prepare:
            self._prepare_gate.clear()
        if forward:
            self._forward_gate.clear()

    def go_on(self) -> None:
        self._prepare_gate.set()
        self._forward_gate.set()

    def die(self) -> None:
        self.deaths += 1
        self.alive = self.revives
        self._lost |= self.in_memory
        self.in_memory.clear()
        self._death.set()
        self._death = asyncio.Event()

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        self.preparations.append(data)
        self.preparing += 1
        assert self.preparing <= self.preparers
        try:
            await self._pass(self._prepare_gate)
            if data in self.slow:
                await self.slow[data].wait()
            if data in self.deadly_media:
                self.die()
                raise TowerLostError
        finally:
            self.preparing -= 1
        if data in self.bad_media:
            raise type(self.bad_media[data])(*self.bad_media[data].args)
        spec = TensorSpec("float32", (self.rows.get(data, 1), WIDTH))
        patches = self.patches.get(data, 1)
        prepared = Prepared(Layout(modality, spec, [[1, 1, 1]]), patches, data[:1], data)
        self.in_memory.add(prepared)
        return prepared

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        assert self.running < self.depth, "more batches at a time than it takes"
        assert len({one.group for one in batch}) == 1
        assert self.in_memory.issuperset(batch)
        names = [one.content for one in batch]
        self.batches.append(names)
        self.tell = tell
        self.running += 1
        try:
            await self._pass(self._forward_gate)
            if self.deadly_batch.intersection(names):
                self.die()
                raise TowerLostError
        finally:
            self.running -= 1
        for name in names:
            if name in self.bad_batch:
                raise type(self.bad_batch[name])(*self.bad_batch[name].args)
        self.in_memory.difference_update(batch)
        made = [torch.full(one.layout.embedding.shape, float(sum(one.content))) for one in batch]
        return list(torch.cat(made).split([len(each) for each in made]))

    def discard(self, prepared: Prepared) -> None:
        self.discarded.append(prepared.content)
        if prepared not in self._lost:
            self.in_memory.remove(prepared)

    async def _pass(self, gate: asyncio.Event) -> None:
        death = self._death
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, death)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if death.is_set():
            raise TowerLostError
