"""How much of something one host may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Shares:
    """A semaphore for each name that is in use.

    Args:
        each: holders at a time, of one name.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        # With how many hold it or want to.
        self._named: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def __len__(self) -> int:
        return len(self._named)

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Around what may be done so many times at once for this name."""
        share, users = self._named.get(name) or (asyncio.Semaphore(self._each), 0)
        self._named[name] = share, users + 1
        try:
            async with share:
                yield
        finally:
            share, users = self._named.pop(name)
            if users > 1:
                self._named[name] = share, users - 1
