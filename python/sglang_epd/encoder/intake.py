"""Room for media that are fetched, while they arrive and until their item has ended.

Bytes are asked for in steps, before they are read. Past the bounds of `admission`, that on
fetched bytes or that on all, the oldest item alone goes on, so that it ends: all items that
are fetched together pass a bound by one item at most, and no order of theirs can stop all of
them. Owns who waits; the bytes themselves
are counted by `Admission`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from types import TracebackType
from typing import Self

from sglang_epd.encoder.admission import Admission
from sglang_epd.errors import RequestCancelledError

Age = tuple[int, int]


class Arrival:
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

    async def grow(self, nbytes: int) -> None:
        """Wait until the item may have `nbytes` bytes, with those that it has."""
        await self._intake._grow(self, nbytes)

    def settle(self, nbytes: int) -> None:
        """The item is here and has so many bytes."""
        self._intake._count(self, nbytes - self.nbytes)

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
        self._waiting: list[tuple[Age, int, Arrival, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        # That fetched items have.
        self._nbytes = 0
        # The item that may pass the bound.
        self._over: Arrival | None = None

    def arrival(self, age: Age) -> Arrival:
        """An item that is about to be fetched.

        Args:
            age: items of the smallest go first.
        """
        return Arrival(self, age)

    def serve(self) -> None:
        """Let those go on for whom there is room now."""
        while self._waiting:
            _, _, arrival, nbytes, turn = self._waiting[0]
            if not (turn.done() or arrival.closed):  # else its fetch was given up
                if not self._permits(arrival, nbytes):
                    return
                self._count(arrival, nbytes - arrival.nbytes)
                turn.set_result(None)
            heapq.heappop(self._waiting)

    async def _grow(self, arrival: Arrival, nbytes: int) -> None:
        if arrival.closed:
            raise RequestCancelledError("nobody waits for these media")
        if nbytes <= arrival.nbytes:
            return
        if self._over is arrival or (not self._waiting and self._permits(arrival, nbytes)):
            self._count(arrival, nbytes - arrival.nbytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (arrival.age, next(self._order), arrival, nbytes, turn)
        heapq.heappush(self._waiting, entry)
        try:
            self.serve()
            await turn
        except asyncio.CancelledError:
            turn.cancel()
            self.serve()  # the next in line may fit where this one did not
            raise

    def _permits(self, arrival: Arrival, nbytes: int) -> bool:
        more, admission = nbytes - arrival.nbytes, self._admission
        if (
            self._nbytes + more <= admission.max_fetched_bytes
            and admission.nbytes + more <= admission.max_bytes
        ):
            return True
        if self._over is None:
            self._over = arrival
        return self._over is arrival

    def _count(self, arrival: Arrival, more: int) -> None:
        arrival.nbytes += more
        self._nbytes += more
        if more >= 0:
            self._admission.note_bytes(more)
        else:
            self._admission.give_bytes(-more)
            self.serve()

    def _succeed(self, arrival: Arrival, heir: Arrival) -> None:
        if self._over is arrival:
            self._over = heir

    def _close(self, arrival: Arrival) -> None:
        arrival.closed = True
        if self._over is arrival:
            self._over = None
        self._count(arrival, -arrival.nbytes)
        self.serve()
