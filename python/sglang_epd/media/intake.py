"""Room for media that are fetched, while they arrive and until their item has ended.

Bytes are asked for in steps, before they are read. A request may have as many of them as are
free (as `media.slots`), by its server's bounds: that on fetched bytes and that on all.
Of those that may not, the oldest item alone goes on, so that it ends: all items that are
fetched together pass a bound by one item at most, and no order of theirs can stop all of them.
Owns the order of waiting; its `ByteBounds` count the bytes themselves.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from sglang_epd.errors import RequestCancelledError
from sglang_epd.media.slots import Account

Age = tuple[int, int]
# Its age, its number in order of asking, its item, and the future of its turn.
_Wait = tuple[Age, int, "Arrival", int, asyncio.Future[None]]


class ByteBounds(Protocol):
    """Of the bytes of media in work.

    Attributes:
        nbytes: now, those that came inline among them.
    """

    nbytes: int

    @property
    def max_bytes(self) -> int:
        """At a time; fetched media are added over the bound as well."""

    @property
    def max_fetched_bytes(self) -> int:
        """The part of `max_bytes` that fetched media may take."""


@dataclass
class FetchBounds:
    """The bounds of a server that counts fetched media alone."""

    max_bytes: int
    nbytes: int = 0

    @property
    def max_fetched_bytes(self) -> int:
        return self.max_bytes


class Arrival(Account):
    """One item's bytes, until `close` gives them back.

    Attributes:
        nbytes: that are counted for it.
        closed: a fetch in another thread, which was given up, may still ask for room.
    """

    def __init__(self, intake: Intake, age: Age) -> None:
        self._intake = intake
        self.age = age
        self.nbytes = 0
        self.closed = False
        self._shared: Arrival | None = None
        self._sharers = 0

    @property
    def owner(self) -> int:
        return self.age[0]

    async def grow(self, nbytes: int) -> None:
        """Wait until the item may have `nbytes` bytes, with those that it has."""
        await self._intake.grow(self, nbytes)

    def settle(self, nbytes: int) -> None:
        """The item is here and has so many bytes, unless they are those that it shares."""
        if self._shared is not None:
            return
        self._intake.count(self, nbytes)
        self._intake.serve()

    def beside(self) -> Arrival:
        """Another, of the same age, for bytes that several items wait for."""
        return Arrival(self._intake, self.age)

    def share(self, other: Arrival) -> None:
        """Have the bytes of `other` too: they are counted once, as those of its request, until
        all of them are closed."""
        self._shared = other
        other._sharers += 1

    def close(self) -> None:
        """Nothing is left of the item's bytes, but for those that have a share in them."""
        self.closed = True
        shared, self._shared = self._shared, None
        if shared is not None:
            shared._sharers -= 1
            if shared.closed:
                shared.close()
        if self._sharers:
            return
        if self._intake.over is self:
            self._intake.over = None
        self.settle(0)


class Intake:
    """Says when bytes may be read; use it from one event loop.

    Args:
        bounds: counts them, with those that came inline.

    Attributes:
        over: the item that may pass the bounds.
    """

    def __init__(self, bounds: ByteBounds) -> None:
        self._bounds = bounds
        # By owner, the oldest first.
        self._waiting: dict[int, list[_Wait]] = {}
        self._order = itertools.count()
        # Bytes of fetched items, by owner.
        self._held: Counter[int] = Counter()
        self._fetched = 0
        self.over: Arrival | None = None

    @contextmanager
    def arrival(self, age: Age) -> Iterator[Arrival]:
        """An item that is fetched, until it has ended.

        Args:
            age: of its request, and its place in it. Of a request's items those of the smallest
                go first.
        """
        arrival = Arrival(self, age)
        try:
            yield arrival
        finally:
            arrival.close()

    def serve(self) -> None:
        """Let waiting items go on while there is room, of the requests with the least first."""
        for owner in sorted(self._waiting, key=self._held.__getitem__):
            while (wait := self._first(owner)) and self._permits(*wait[2:4]):
                self._go_on(wait)
        if self.over is None and self._waiting:
            wait = min(waits[0] for waits in self._waiting.values())
            self.over = wait[2]
            self._go_on(wait)

    async def grow(self, arrival: Arrival, nbytes: int) -> None:
        if arrival.closed:
            raise RequestCancelledError("these media are no longer wanted")
        if nbytes <= arrival.nbytes:
            return
        if self.over is arrival or (
            arrival.owner not in self._waiting and self._permits(arrival, nbytes)
        ):
            self.count(arrival, nbytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waits = self._waiting.setdefault(arrival.owner, [])
        heapq.heappush(waits, (arrival.age, next(self._order), arrival, nbytes, turn))
        try:
            self.serve()
            await turn
        except asyncio.CancelledError:
            turn.cancel()
            self.serve()  # the next in line may fit where this one did not
            raise

    def _first(self, owner: int) -> _Wait | None:
        """Of an owner's, the first that still waits."""
        waits = self._waiting.get(owner, [])
        while waits and (waits[0][4].done() or waits[0][2].closed):  # its fetch was given up
            heapq.heappop(waits)
        if waits:
            return waits[0]
        self._waiting.pop(owner, None)
        return None

    def _go_on(self, wait: _Wait) -> None:
        _, _, arrival, nbytes, turn = wait
        self.count(arrival, nbytes)
        turn.set_result(None)
        self._first(arrival.owner)

    def _permits(self, arrival: Arrival, nbytes: int) -> bool:
        more, bounds = nbytes - arrival.nbytes, self._bounds
        free = min(bounds.max_fetched_bytes - self._fetched, bounds.max_bytes - bounds.nbytes)
        return self._held[arrival.owner] + more <= free

    def count(self, arrival: Arrival, nbytes: int) -> None:
        more = nbytes - arrival.nbytes
        arrival.nbytes = nbytes
        self._bounds.nbytes += more
        self._fetched += more
        self._held[arrival.owner] += more
        if not self._held[arrival.owner]:
            del self._held[arrival.owner]
