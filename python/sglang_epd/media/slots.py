"""How many fetches run at a time, and which slow ones are given up for those that wait.

A fetch has a slot until another owner needs the slot, up to its time limit. While an owner
waits, the slowest of the fetches that have sent less than `MIN_BYTES_PER_S` are given up, of owners
with more slots. Slow hosts of many names can therefore not fill all slots.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from sglang_epd.errors import MediaError

# Given up where others wait: a fetch that is older, and has been slower, than this.
GRACE_S = 1.5
MIN_BYTES_PER_S = 64 << 10
_LOOK_S = 0.1


class Account:
    """The account of a fetch without one: a request of its own with any number of bytes."""

    @property
    def owner(self) -> int:
        """The request that it is of; requests share the slots."""
        return id(self)

    async def grow(self, nbytes: int) -> None:
        """Wait until the media may have so many bytes in memory."""


class Turn:
    """One fetch that has a slot.

    Attributes:
        account: the request that it counts against.
        nbytes: that have arrived.
        gave_way: whether it was given up for others.
        rated: whether its rate counts.
    """

    def __init__(self, patience: asyncio.Timeout, account: Account) -> None:
        self._clock = asyncio.get_running_loop().time
        self.account = account
        self._patience = patience
        self._began = self._clock()
        self._paused = False
        self.nbytes = 0
        self.gave_way = False
        self.rated = True

    @property
    def rate(self) -> float | None:
        """Bytes a second; None where it is too early to tell, or not the host's fault."""
        elapsed_s = self._clock() - self._began
        if not self.rated or self._paused or self._patience.expired() or elapsed_s < GRACE_S:
            return None
        return self.nbytes / elapsed_s

    def give_way(self) -> None:
        """End it at once."""
        self.gave_way = True
        self._patience.reschedule(self._clock())

    async def grow(self, nbytes: int) -> None:
        """As the account's, without the time that it takes."""
        began, until = self._clock(), self._patience.when()
        self._patience.reschedule(None)
        self._paused = True
        await self.account.grow(nbytes)
        self._paused = False
        waited_s = self._clock() - began
        self._began += waited_s
        if until is not None:
            self._patience.reschedule(until + waited_s)


class Slots:
    """Fetches at a time; use it from one event loop.

    Args:
        total: of all hosts.
        per_host: of these, from one host, so that a slow one delays its own.

    Attributes:
        hosts: those that are fetched from.
    """

    def __init__(self, total: int, per_host: int) -> None:
        self._all = Shares(total)
        self._per_host = per_host
        self.hosts: dict[str, Shares] = {}
        self._turns: set[Turn] = set()
        self._looking: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def turn(
        self, host: str, shown: str, limit_s: float, account: Account
    ) -> AsyncIterator[Turn]:
        """A slot, and the time that one item may take.

        Args:
            shown: the source, as a message may name it.
            limit_s: counts from when there is a slot: full slots are not the media's fault.
            account: of the item.

        Raises:
            MediaError: it took longer, or was too slow while others waited.
        """
        self._look_later()
        async with self._from(host, account.owner), self._all.of(account.owner):
            try:
                async with asyncio.timeout(limit_s) as patience:
                    turn = Turn(patience, account)
                    self._turns.add(turn)
                    yield turn
            except TimeoutError:
                if turn.gave_way:
                    raise MediaError(
                        f"{shown} was sent too slowly while other media waited", reason="slow"
                    ) from None
                raise MediaError(
                    f"{shown} took longer than {limit_s:g} s", reason="timeout"
                ) from None
            finally:
                self._turns.discard(turn)

    @asynccontextmanager
    async def _from(self, host: str, owner: Hashable) -> AsyncIterator[None]:
        share = self.hosts.setdefault(host, Shares(self._per_host))
        try:
            async with share.of(owner):
                yield
        finally:
            if not share.held and not share.waiting:
                self.hosts.pop(host, None)

    def close(self) -> None:
        """Look no more; the event loop may end."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look_later(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Give up as many slow fetches as there are that wait: of owners that have more slots
        than one that waits, the slowest of those with the most."""
        self._looking = None
        waiting, held = self._all.waiting.values(), self._all.held
        if not waiting:
            return
        self._look_later()
        least = min(held[owner] for owner in waiting)
        rates = [(turn.rate, turn) for turn in self._turns if not turn.gave_way]
        slow = [
            (-held[turn.account.owner], rate, turn)
            for rate, turn in rates
            if rate is not None and rate < MIN_BYTES_PER_S and held[turn.account.owner] > least
        ]
        slow.sort(key=lambda one: one[:2])
        for _, _, turn in slow[: len(waiting)]:
            turn.give_way()


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
