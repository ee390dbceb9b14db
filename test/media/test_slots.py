from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from sglang_epd.media.slots import Shares

PATIENCE_S = 10.0


class Holders:
    """Tasks that have a place, or wait for one, until they are cancelled."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.order: list[str] = []

    async def _hold(self, owner: str) -> None:
        async with self._shares.of(owner):
            self.order.append(owner)
            await asyncio.Event().wait()

    async def add(self, owner: str, count: int = 1) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._hold(owner)) for _ in range(count)]
        await asyncio.sleep(0)
        return tasks


async def leave(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_as_much_stays_free_as_the_greediest_have():
    shares = Shares(16)
    holders = Holders(shares)
    tasks = await holders.add("a", 20)
    assert (shares.held["a"], shares.free) == (8, 8)
    tasks += [*await holders.add("b", 20), *await holders.add("c", 20)]
    assert shares.held == {"a": 8, "b": 4, "c": 2}
    assert shares.free == 2
    async with asyncio.timeout(PATIENCE_S), shares.of("new"), shares.of("newer"):
        assert shares.free == 0
    await leave(*tasks)
    assert (shares.held, shares.waiting, shares.free) == ({}, {}, 16)


async def test_places_that_become_free_go_to_those_who_have_less():
    shares = Shares(8)
    holders = Holders(shares)
    first = await holders.add("a", 8)
    others = await holders.add("b", 8)
    assert shares.held == {"a": 4, "b": 2}
    await leave(*first[:2])
    assert (shares.held, shares.free) == ({"a": 3, "b": 3}, 2)
    await leave(*first, *others)


async def test_the_last_place_is_had_by_whoever_has_none():
    shares = Shares(1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(shares.of("a"))
        waits = asyncio.create_task(stack.enter_async_context(shares.of("b")))
        await asyncio.sleep(0)
        assert list(shares.waiting.values()) == ["b"]
        waits.cancel()


async def test_one_who_leaves_when_given_a_place_gives_it_back():
    shares = Shares(1)
    holders = Holders(shares)
    (holding,) = await holders.add("a")
    (leaving,) = await holders.add("b")
    holding.cancel()
    await asyncio.sleep(0)  # the place is b's, who has not gone on yet
    assert shares.held == {"b": 1}
    await leave(leaving)
    assert (holders.order, shares.free, shares.held) == (["a"], 1, {})


async def test_one_who_left_is_given_no_place():
    shares = Shares(1)
    holders = Holders(shares)
    (holding,) = await holders.add("a")
    (leaving,) = await holders.add("b")
    (next_one,) = await holders.add("c")
    leaving.cancel()
    holding.cancel()
    await asyncio.gather(leaving, holding, return_exceptions=True)
    await asyncio.sleep(0)
    assert holders.order == ["a", "c"]
    await leave(next_one)
    assert shares.free == 1


def test_there_is_a_place():
    with pytest.raises(ValueError, match="positive"):
        Shares(0)
