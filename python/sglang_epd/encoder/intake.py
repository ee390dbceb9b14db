"""Room for media that are fetched, while they arrive and until their item has ended.

Bytes are asked for in steps, before they are read. A request may have as many of them as are
free (as `media.slots`), by the bounds of `admission`: that on fetched bytes and that on all.
Of those that may not, the oldest item alone goes on, so that it ends: all items that are
fetched together pass a bound by one item at most, and no order of theirs can stop all of them.
Owns the order of waiting; `Admission` counts the bytes themselves.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from types import TracebackType
from typing import Self

from sglang_epd.encoder.admission import Admission
from sglang_epd.errors import RequestCancelledError
from sglang_epd.media import Account

Age = tuple[int, int]
# Its age, its number in order of asking, its item, and the future of its turn.
_Wait = tuple[Age, int, "Arrival", int, asyncio.Future[None]]


class Arrival(Account):
    """One item's bytes; gives them back when it is left.

    Attributes:
        nbytes: that are counted for it.
        closed: a fetch in another thread, which was given up, may still ask for room.
    """

    def __init__(self, intake: Intake, age: Age) -> None:
        self._intake = intake
        self.age = age
        self.nbytes = 0
        self.closed = False

    @property
    def owner(self) -> int:
        return self.age[0]

    async def grow(self, nbytes: int) -> None:
        """Wait until the item may have `nbytes` bytes, with those that it has."""
        await self._intake._grow(self, nbytes)

    def settle(self, nbytes: int) -> None:
        """The item is here and has so many bytes."""
        self._intake._count(self, nbytes - self.nbytes)
        self._intake.serve()

    def beside(self) -> Arrival:
        """Another, of the same age, for bytes that several items wait for."""
        return Arrival(self._intake, self.age)

    def share(self, other: Arrival) -> None:
        """Have the bytes of `other`, which is about to be closed, and its place."""
        self.settle(other.nbytes)
        self._intake._succeed(other, self)

    def close(self) -> None:
        """Nothing is left of the item's bytes."""
        self._intake._close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Intake:
    """Says when bytes may be read; use it from one event loop.

    Args:
        admission: counts them, with those that came inline.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        # By owner, the oldest first.
        self._waiting: dict[int, list[_Wait]] = {}
        self._order = itertools.count()
        # That fetched items have, by owner and together.
        self._held: Counter[int] = Counter()
        self._nbytes = 0
        # The item that may pass the bounds.
        self._over: Arrival | None = None

    def arrival(self, age: Age) -> Arrival:
        """An item that is about to be fetched.

        Args:
            age: of its request, and its place in it. Of a request's items those of the smallest
                go first.
        """
        return Arrival(self, age)

    def serve(self) -> None:
        """Let waiting items go on while there is room, of the requests with the least first."""
        for owner in sorted(self._waiting, key=self._held.__getitem__):
            while (wait := self._first(owner)) and self._permits(*wait[2:4]):
                self._go_on(wait)
        if self._over is None and self._waiting:
            wait = min(waits[0] for waits in self._waiting.values())
            self._over = wait[2]
            self._go_on(wait)

    async def _grow(self, arrival: Arrival, nbytes: int) -> None:
        if arrival.closed:
            raise RequestCancelledError("nobody waits for these media")
        if nbytes <= arrival.nbytes:
            return
        if self._over is arrival or (
            arrival.owner not in self._waiting and self._permits(arrival, nbytes)
        ):
            self._count(arrival, nbytes - arrival.nbytes)
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
        self._count(arrival, nbytes - arrival.nbytes)
        turn.set_result(None)
        self._first(arrival.owner)

    def _permits(self, arrival: Arrival, nbytes: int) -> bool:
        more, admission = nbytes - arrival.nbytes, self._admission
        free = min(
            admission.max_fetched_bytes - self._nbytes, admission.max_bytes - admission.nbytes
        )
        return self._held[arrival.owner] + more <= free

    def _count(self, arrival: Arrival, more: int) -> None:
        arrival.nbytes += more
        self._nbytes += more
        self._held[arrival.owner] += more
        if not self._held[arrival.owner]:
            del self._held[arrival.owner]
        if more >= 0:
            self._admission.note_bytes(more)
        else:
            self._admission.give_bytes(-more)

    def _succeed(self, arrival: Arrival, heir: Arrival) -> None:
        if self._over is arrival:
            self._over = heir

    def _close(self, arrival: Arrival) -> None:
        arrival.closed = True
        if self._over is arrival:
            self._over = None
        self._count(arrival, -arrival.nbytes)
        self.serve()
