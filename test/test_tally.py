from __future__ import annotations

import asyncio
import time

import pytest

from sglang_epd.tally import LoopLag


@pytest.fixture
def seen():
    return []


async def test_a_loop_that_stood_still_was_late_by_as_much(seen):
    lag = LoopLag(seen.append)
    lag.start()
    await asyncio.sleep(0.15)
    time.sleep(0.5)  # noqa: ASYNC251 - this is what is measured
    await asyncio.sleep(0.15)
    lag.stop()
    # The timer was due at some time of the half second.
    assert max(seen) > 0.3
    assert min(seen) >= 0.0


async def test_it_measures_once_however_often_it_is_started(seen):
    lag = LoopLag(seen.append)
    for _ in range(3):
        lag.start()
    await asyncio.sleep(0.55)
    lag.stop()
    assert 1 <= len(seen) <= 5
    told = len(seen)
    await asyncio.sleep(0.25)
    assert len(seen) == told


def test_it_need_not_have_begun_to_be_ended(seen):
    LoopLag(seen.append).stop()
    assert seen == []
