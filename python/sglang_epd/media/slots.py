"""How many fetches run at a time, and which of them makes way for those that wait.

A fetch has a slot for as long as nobody else needs the slot, up to its time limit. While others
wait, the slowest of the fetches that have sent less than `MIN_BYTES_PER_S` is given up. Slow
hosts of many names can therefore not fill all slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from sglang_epd.errors import MediaError
from sglang_epd.media.shares import Shares

# Given up where others wait: a fetch that is older, and has been slower, than this.
GRACE_S = 1.5
MIN_BYTES_PER_S = 64 << 10
_LOOK_S = 0.1

# Waits until an item may have so many bytes in memory.
RoomFor = Callable[[int], Coroutine[Any, Any, None]]


class Turn:
    """One fetch that has a slot.

    Attributes:
        nbytes: that have arrived.
        gave_way: whether it was given up for others.
    """

    def __init__(self, patience: asyncio.Timeout) -> None:
        self._clock = asyncio.get_running_loop().time
        self._patience = patience
        self._began = self._clock()
        self._paused = False
        self.nbytes = 0
        self.gave_way = False

    @property
    def rate(self) -> float | None:
        """Bytes a second; None where it is too early to tell, or not the host's fault."""
        elapsed_s = self._clock() - self._began
        if self._paused or self._patience.expired() or elapsed_s < GRACE_S:
            return None
        return self.nbytes / elapsed_s

    def give_way(self) -> None:
        """End it at once."""
        self.gave_way = True
        self._patience.reschedule(self._clock())

    def pausing(self, wait: RoomFor) -> RoomFor:
        """`wait`, of which the time does not count."""

        async def paused(nbytes: int) -> None:
            began, until = self._clock(), self._patience.when()
            self._patience.reschedule(None)
            self._paused = True
            await wait(nbytes)
            self._paused = False
            waited_s = self._clock() - began
            self._began += waited_s
            if until is not None:
                self._patience.reschedule(until + waited_s)

        return paused


class Slots:
    """Fetches at a time; use it from one event loop.

    Args:
        total: of all hosts.
        per_host: of these, from one host, so that a slow one delays its own.
    """

    def __init__(self, total: int, per_host: int) -> None:
        if total < 1 or per_host < 1:
            raise ValueError("concurrency must be positive")
        self._slots = asyncio.Semaphore(total)
        self.hosts = Shares(per_host)
        self._turns: set[Turn] = set()
        self._waiting = 0
        self._looking: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(self, host: str, shown: str, limit_s: float) -> AsyncIterator[Turn]:
        """A slot, and the time that one item may take.

        Args:
            shown: the source, as a message may name it.
            limit_s: counts from when there is a slot: full slots are not the media's fault.

        Raises:
            MediaError: it took longer, or was too slow while others waited.
        """
        async with self.hosts.of(host), self._slot():
            turn: Turn | None = None
            try:
                async with asyncio.timeout(limit_s) as patience:
                    turn = Turn(patience)
                    self._turns.add(turn)
                    yield turn
            except TimeoutError:
                if turn is not None and turn.gave_way:
                    raise MediaError(
                        f"{shown} was sent too slowly while other media waited", reason="slow"
                    ) from None
                raise MediaError(
                    f"{shown} took longer than {limit_s:g} s", reason="timeout"
                ) from None
            finally:
                if turn is not None:
                    self._turns.discard(turn)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self._waiting += 1
        if self._slots.locked():
            self._look()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    def _look(self) -> None:
        """Give up as many of the slowest as there are fetches that wait."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if not self._waiting:
            return
        rates = ((turn.rate, turn) for turn in self._turns if not turn.gave_way)
        slow = [(rate, turn) for rate, turn in rates if rate is not None and rate < MIN_BYTES_PER_S]
        slow.sort(key=lambda one: one[0])
        leaving = sum(turn.gave_way for turn in self._turns)
        for _, turn in slow[: max(0, self._waiting - leaving)]:
            turn.give_way()
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
