"""Places that owners share, so that none of them takes all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Shares:
    """Places at a time, of which an owner may have as many as are free; for one event loop.

    Owners that take all they may have the same number in the end, and as many places are
    free for a new owner. Free places go first to owners with few.
    (Dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998.)

    Args:
        total: places; the last one goes to an owner without any.

    Attributes:
        held: places by owner.
        waiting: the owners that wait for a place, in order.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("concurrency must be positive")
        self.free = total
        self.held: Counter[Hashable] = Counter()
        self.waiting: dict[asyncio.Future[None], Hashable] = {}

    @asynccontextmanager
    async def of(self, owner: Hashable) -> AsyncIterator[None]:
        """Holds a place while the context lasts."""
        if not self._take(owner):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting[turn] = owner
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    del self.waiting[turn]
                else:
                    self._give(owner)
                raise
        try:
            yield
        finally:
            self._give(owner)

    def _take(self, owner: Hashable) -> bool:
        if self.held[owner] + 1 > self.free:
            return False
        self.held[owner] += 1
        self.free -= 1
        return True

    def _give(self, owner: Hashable) -> None:
        self.free += 1
        self.held[owner] -= 1
        if not self.held[owner]:
            del self.held[owner]
        for turn, other in list(self.waiting.items()):
            if not turn.done() and self._take(other):
                del self.waiting[turn]
                turn.set_result(None)
