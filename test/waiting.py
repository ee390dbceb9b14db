"""Waits of tests for what nobody signals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return when the condition is true; a `TimeoutError` says that it did not become so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
