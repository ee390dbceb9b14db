"""What lies between servers: links that carry one thing after the other, and the memory
that embeddings land in."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

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
    """When bytes that are sent now will be there. Both ends are taken for as long as they
    move, one transfer after the other."""
    seconds = nbytes / bytes_per_s
    end = max(now, sender.free_at, receiver.free_at) + seconds
    sender.free_at = receiver.free_at = end
    sender.busy_s += seconds
    receiver.busy_s += seconds
    return end + latency_s


class Workers:
    """Threads that take one item each, in the order in which items come."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self.busy_s = 0.0

    def backlog_s(self, now: float) -> float:
        """How long work that comes now would wait."""
        return max(0.0, self._free_at[0] - now)

    def end(self, now: float, seconds: float) -> float:
        """When work that comes now will be done."""
        end = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        self.busy_s += seconds
        return end


@dataclass
class Arena:
    """A language server's receive budget: the package's allocator, granted by the request,
    oldest first.

    The real ledger grants by the item, and keeps requests that hold some items from blocking
    each other; here a request gets the room for all of its items at once.

    Attributes:
        waited_s: of all requests together, for room.
    """

    env: simpy.Environment
    nbytes: int
    waited_s: float = 0.0
    _offsets: dict[int, int] = field(default_factory=dict)
    _waiting: list[tuple[int, int, float]] = field(default_factory=list)
    _wanted: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._extents = Extents(self.nbytes)

    @property
    def held_bytes(self) -> int:
        return self._extents.taken_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether there can ever be room for as much."""
        return aligned(nbytes) <= self._extents.size

    def holds(self, request: Request) -> bool:
        """Whether the request has its room."""
        return request.number in self._offsets

    def grant(self, request: Request, nbytes: int, then: Callable[[], None]) -> None:
        """Call `then` as soon as the request has its room, which may be at once. It has none."""
        if request.number in self._wanted:
            self._wanted[request.number].append(then)
        else:
            self._wanted[request.number] = [then]
            heapq.heappush(self._waiting, (request.number, nbytes, self.env.now))
            self._go_on()

    def release(self, request: Request) -> None:
        """Nobody reads its embeddings any more, or waits for them."""
        offset = self._offsets.pop(request.number, None)
        if offset is not None:
            self._extents.give(offset)
        self._wanted.pop(request.number, None)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            number, nbytes, since = self._waiting[0]
            if number in self._wanted:
                offset = self._extents.take(nbytes)
                if offset is None:
                    return
                self._offsets[number] = offset
                self.waited_s += self.env.now - since
            heapq.heappop(self._waiting)
            for then in self._wanted.pop(number, ()):
                then()
