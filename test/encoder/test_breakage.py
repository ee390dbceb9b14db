"""A real module on the CPU that fails at some inputs, or from some moment on at all."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
import torch

from sglang_epd.encoder.breakage import Breakage, in_time
from sglang_epd.encoder.tower import TowerBrokenError
from sglang_epd.errors import EncodeError

WIDTH = 4
STICKY = "CUDA error: an illegal memory access was encountered\nCompile with ..."


class Tower:
    """As `engine.Engine`: its calls are watched, its probe is one of its forwards.

    Attributes:
        failures: how many more forwards fail, whatever they are given.
    """

    def __init__(self) -> None:
        self.module = torch.nn.Linear(WIDTH, 2)
        self.module.register_forward_pre_hook(self._fail)
        self.failures = 0
        self.probes = 0
        self.seconds = 0.0
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.held_at_probe: list[int] = []
        self.breakage = Breakage(self._probe, pause_s=0.01)

    async def forward(self, width: int = WIDTH, limit_s: float | None = None) -> torch.Tensor:
        run = asyncio.to_thread(self._run, width)
        return await self.breakage.watch(run if limit_s is None else in_time(run, limit_s))

    def _run(self, width: int) -> torch.Tensor:
        batch = torch.ones(1, width)
        self.given.append(weakref.ref(batch))
        time.sleep(self.seconds)
        made: torch.Tensor = self.module(batch)
        return made

    def _fail(self, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError(STICKY)

    async def _probe(self) -> None:
        self.probes += 1
        gc.collect()
        self.held_at_probe.append(sum(given() is not None for given in self.given))
        await asyncio.to_thread(self._run, WIDTH)


async def test_an_item_that_a_sound_tower_fails_at_is_the_items_failure():
    tower = Tower()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        await tower.forward(WIDTH + 1)
    assert (tower.probes, tower.breakage.reason) == (1, "")
    assert (await tower.forward()).shape == (1, 2)


async def test_a_tower_that_fails_at_everything_is_broken():
    tower = Tower()
    await tower.forward()
    tower.failures = 1000
    with pytest.raises(TowerBrokenError) as raised:
        await tower.forward()
    assert str(raised.value) == tower.breakage.reason
    assert tower.breakage.reason.endswith("CUDA error: an illegal memory access was encountered)")
    assert tower.probes == 2


async def test_one_probe_that_fails_is_not_enough():
    tower = Tower()
    tower.failures = 2  # the item's own, and the first probe
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await tower.forward()
    assert (tower.probes, tower.breakage.reason) == (2, "")


async def test_those_who_fail_together_share_a_verdict():
    tower = Tower()
    tower.failures = 1000
    outcomes = await asyncio.gather(*(tower.forward() for _ in range(6)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {TowerBrokenError}
    assert tower.probes == 2


async def test_those_who_failed_before_a_probe_began_share_that_it_was_well():
    gate = asyncio.Event()
    probes = 0

    async def probe() -> None:
        nonlocal probes
        probes += 1
        await gate.wait()

    async def fail() -> None:
        raise RuntimeError("x")

    breakage = Breakage(probe)
    calls = [asyncio.create_task(breakage.watch(fail())) for _ in range(6)]
    await asyncio.sleep(0.01)
    gate.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {RuntimeError}
    assert probes == 2, "the first one's own, and one for those who failed meanwhile"


async def test_what_was_foreseen_asks_for_no_verdict():
    tower = Tower()

    async def refuse() -> None:
        raise EncodeError("the encoder made another shape")

    with pytest.raises(EncodeError):
        await tower.breakage.watch(refuse())
    assert tower.probes == 0


async def test_what_failed_gives_its_memory_back_before_the_probe():
    tower = Tower()
    with pytest.raises(RuntimeError):
        await tower.forward(WIDTH + 1)
    assert tower.held_at_probe == [0]


async def test_a_batch_without_end_is_in_a_broken_tower():
    tower = Tower()
    tower.seconds = 0.3
    with pytest.raises(TowerBrokenError, match=r"takes longer than 0\.05 s"):
        await tower.forward(limit_s=0.05)
    assert tower.probes == 0
    await asyncio.sleep(0.3)  # the thread ends
