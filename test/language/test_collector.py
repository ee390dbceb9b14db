from __future__ import annotations

import asyncio

import pytest
import torch

from sglang_epd.errors import DeadlineError, UnavailableError
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.control import Control
from sglang_epd.wire.messages import Expect, Settled

EXPECT = Expect("ticket", 2, 1, 60.0)


class FakeControl(Control):
    """Settles a claim when the test says so."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.claimed: list[tuple[Expect, int]] = []
        self.outcome: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        self.error: UnavailableError | None = None

    async def arena(self, timeout_s: float) -> Arena:
        assert timeout_s == EXPECT.ttl_s
        if self.error is not None:
            raise self.error
        return self._arena

    async def claim(self, expect: Expect, reader: int) -> Settled:
        self.claimed.append((expect, reader))
        return await self.outcome


@pytest.fixture
async def control(memory):
    return FakeControl(memory.rank(0))


@pytest.fixture
def collect(control):
    return lambda: asyncio.create_task(control.collect(EXPECT))


async def test_the_items_are_read_where_they_landed(control, collect, memory, filled):
    landed = [memory.land(1.0), memory.land(2.0)]
    collecting = collect()
    control.outcome.set_result(Settled("0", tuple(landed)))
    items = await collecting
    assert control.claimed == [(EXPECT, 0)]
    assert [(item.key, item.layout) for item in items] == [(it.key, it.layout) for it in landed]
    for item, value in zip(items, (1.0, 2.0), strict=True):
        assert torch.equal(item.embedding, filled(value))
        assert memory.holds(0, item.embedding)
    del item, collecting
    assert memory.drops(landed[0]) == [0, 0, 0]
    items.clear()
    assert [memory.drops(item) for item in landed] == [[1, 0, 0]] * 2


async def test_what_became_of_them_instead_is_raised(control, collect):
    control.outcome.set_result(Settled("0", (), "DeadlineError", "2 of 2 had not arrived"))
    with pytest.raises(DeadlineError, match="2 of 2"):
        await collect()


async def test_items_that_come_with_an_error_are_given_back(control, collect, memory):
    landed = memory.land(1.0)
    control.outcome.set_result(Settled("0", (landed,), "RequestCancelledError", "gone"))
    (error,) = await asyncio.gather(collect(), return_exceptions=True)
    assert error.code == "RequestCancelledError"
    del error  # its trace holds the frame that they were read in
    assert memory.drops(landed) == [1, 0, 0]


async def test_without_a_receiver_nothing_is_claimed(control, collect):
    control.error = UnavailableError("no answer")
    with pytest.raises(UnavailableError):
        await collect()
    assert not control.claimed


async def test_it_can_be_cancelled_while_it_waits(control, collect):
    collecting = collect()
    await asyncio.sleep(0)
    assert control.claimed
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert control.outcome.cancelled()
