from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from encoder.towers import FakeTower, key_of, until
from integrity import check_cache
from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.pipeline.work import Hold
from sglang_epd.observability.encoder import EncoderMetrics


@pytest.fixture
async def towers(request: pytest.FixtureRequest) -> list[FakeTower]:
    return [FakeTower() for _ in range(getattr(request, "param", 1))]


@pytest.fixture
def tower(towers: list[FakeTower]) -> FakeTower:
    return towers[0]


@pytest.fixture
def bounds() -> dict[str, Any]:
    """What the computations are given beside their towers; tests are parametrised by it."""
    return {}


@pytest.fixture
async def computations(
    towers: list[FakeTower], metrics: EncoderMetrics, bounds: dict[str, Any]
) -> AsyncIterator[Computations]:
    """Afterwards nothing may be left of what was asked for."""
    given = {"batch": BatchBounds(patches=100, items=4), "capacity": 1 << 30, **bounds}
    cache = EmbeddingCache(given.pop("capacity"))
    computations = Computations(towers, cache, metrics, **given)
    yield computations
    for tower in towers:
        tower.go_on()
    await computations.close()
    check_cache(cache)
    assert not any(computations.status()["queue"].values())
    assert not any(tower.in_memory for tower in towers)


@pytest.fixture
async def ask(computations: Computations) -> AsyncIterator[Callable[..., Hold]]:
    holds: list[Hold] = []

    def hold(
        name: bytes, owner: str = "r", ttl_s: float = 60.0, *, media: bool = True, **more: Any
    ) -> Hold:
        data, deadline = name if media else None, time.monotonic() + ttl_s
        holds.append(computations.hold(key_of(name), "IMAGE", data, owner, deadline, **more))
        return holds[-1]

    yield hold
    for one in holds:
        one.release()


@pytest.fixture
async def busy(tower: FakeTower, ask: Callable[..., Hold]) -> Hold:
    """An item that runs until the tower is to go on."""
    tower.hold(forward=True)
    hold = ask(b"busy", "other")
    await until(lambda: tower.running)
    return hold
