"""The resources between servers: links, the receive budget, and threads beside a model."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from sglang_epd.transfer.extents import Extents, aligned
from sglang_epd_plan.records import Request


@dataclass
class Port:
    """One server's end of the network, in one direction."""

    free_at: float = 0.0
    busy_s: float = 0.0


def arrival(
    now: float,
    nbytes: float,
    sender: Port,
    receiver: Port,
    *,
    latency_s: float,
    bytes_per_s: float,
) -> float:
    """When bytes that are sent now arrive. A port carries one transfer after the other."""
    seconds = nbytes / bytes_per_s
    end = max(now, sender.free_at, receiver.free_at) + seconds
    for port in (sender, receiver):
        port.free_at = end
        port.busy_s += seconds
    return end + latency_s


class Threads:
    """Threads that take one piece of work each, in order of arrival."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count

    def end(self, now: float, seconds: float) -> float:
        """When work that arrives now will be done."""
        end = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        return end


class ReceiveBudget:
    """A language server's memory for embeddings, in the package's own allocator.

    The real ledger grants memory by the item, and keeps requests that hold some items from
    blocking each other. Here a request gets the room for all of its items at once, the oldest
    request first.
    """

    def __init__(self, nbytes: int) -> None:
        self.extents = Extents(nbytes)
        self._offsets: dict[int, int] = {}
        # Requests that wait, as a heap, with the callback of each, unless the request has ended.
        self._waiting: list[tuple[int, int]] = []
        self._calls: dict[int, list[Callable[[], None]]] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether there can ever be room for so many bytes."""
        return aligned(nbytes) <= self.extents.size

    def grant(self, request: Request, nbytes: int, then: Callable[[], None]) -> None:
        """Call `then` as soon as the request has its room, perhaps at once."""
        if request.number in self._offsets:
            then()
        elif request.number in self._calls:
            self._calls[request.number].append(then)
        else:
            self._calls[request.number] = [then]
            heapq.heappush(self._waiting, (request.number, nbytes))
            self._go_on()

    def release(self, request: Request) -> None:
        """Free the request's room, or let it wait no longer."""
        offset = self._offsets.pop(request.number, None)
        if offset is not None:
            self.extents.give(offset)
        self._calls.pop(request.number, None)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            number, nbytes = self._waiting[0]
            if number in self._calls:
                offset = self.extents.take(nbytes)
                if offset is None:
                    return
                self._offsets[number] = offset
            heapq.heappop(self._waiting)
            for then in self._calls.pop(number, ()):
                then()
