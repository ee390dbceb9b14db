"""Waits of tests for what nobody signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return when the condition is true; a `TimeoutError` says that it did not become so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def reached(
    condition: Callable[[], T], seconds: float = 20.0, why: object = "", pause_s: float = 0.005
) -> T:
    """What made the condition true; an `AssertionError` says that it did not become so."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, why or "it did not happen in time"
        time.sleep(pause_s)
    return found
