"""Which items are prepared and run next: plain data, no clock, no tower.

Fair between requests, after the fair sojourn protocol (Friedman and Henderson, SIGMETRICS
2003). Were the tower shared equally, owners would be done in some order; in that order
they have all of it, one after the other. A request of 64 images lets single images that
come after it pass, as long as they would be done before it; two requests of 4 do not both
wait for the other's last image, as they would if they took turns. The shares are reckoned
in virtual time, which goes on with the work that is done, divided by the owners that are
here. (The protocol also counts those that are done but would not be with their share. Then
one client that asks for an image whenever it has one would hold up a request of 64 for
thousands: its images would share the tower long after they were done.)

An owner's jobs go by their places among its items: its language server may prefill what comes
before the first item that is missing.

Deadline-aware, by owners, because one that misses an item has no use for its others. An owner
that would be late in that order, and not if it went now, goes first, if that makes none late
that has its turn before it; among several the earliest deadline. An owner that would be late in
any case comes behind all others, and in no batch of theirs: under overload its jobs would end
when nothing waits for them any more. Where nothing else is to be done they are done, since costs
are estimates. A job whose deadline has passed is never returned.

`Utilisation` is how much of the recent past towers spent running.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

_SPAN_S = 60.0
# Ends that a queue notes before it forgets old ones, beside two for each of its jobs.
_NOTED = 64


@dataclass(frozen=True)
class BatchBounds:
    """How much may run together.

    Attributes:
        patches: of a batch of several items; one item may have more.
        items: of a batch.
    """

    patches: int
    items: int


@dataclass(eq=False)
class Job:
    """One item's turn at something.

    Attributes:
        owner: the request it is for.
        cost: in patches, or the measure that all jobs of a queue share.
        deadline: in the caller's clock.
        place: among its owner's jobs; the smallest goes first.
        nbytes: memory that it will take when it has run.
        group: only jobs of equal groups are run together.
        alone: never to be run with others.
        large: `first` may be asked for one that is not.
        parked: not to be returned now.
        content: its user's own.
    """

    owner: Hashable
    cost: float
    deadline: float
    place: int = 0
    nbytes: int = 0
    group: Hashable = None
    alone: bool = False
    large: bool = False
    parked: bool = False
    content: Any = None
    number: int = field(default=0, repr=False)


_J = TypeVar("_J", bound=Job)


class FairQueue(Generic[_J]):
    """Jobs that wait for their turn.

    A job costs the same however many wait: `first` looks at all of them only where one may be
    late, or where the one whose turn it is may not run.
    """

    def __init__(self) -> None:
        self._jobs: dict[_J, None] = {}
        # Those of them that are not large.
        self._small: dict[_J, None] = {}
        # The same, by owner, in the order of their places.
        self._waiting: dict[Hashable, list[_J]] = {}
        self._virtual = 0.0
        # When owners would be done with their shares, if they wait or that is later than now.
        # After it comes the number of their first job, as two may be done at the same time.
        self._ends: dict[Hashable, tuple[float, int]] = {}
        # A heap of them, among others that have changed since.
        self._turns: list[tuple[tuple[float, int], Hashable]] = []
        self._noted = 0
        # No job's deadline is before it.
        self._soonest = math.inf
        # No job costs less.
        self._least = math.inf
        self._pushed = 0
        self.cost = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[_J]:
        return iter(self._jobs)

    def __contains__(self, job: _J) -> bool:
        return job in self._jobs

    def push(self, job: _J) -> None:
        """Let a job wait, which does not yet."""
        self._pushed += 1
        job.number = self._pushed
        end, number = self._ends.get(job.owner, (0.0, job.number))
        if end <= self._virtual and job.owner not in self._waiting:
            number = job.number
        self._jobs[job] = None
        if not job.large:
            self._small[job] = None
        insort(self._waiting.setdefault(job.owner, []), job, key=_place)
        self.cost += job.cost
        self._least = min(self._least, job.cost)
        self._note_end(job.owner, max(self._virtual, end) + job.cost, number)
        self.hurry(job)

    def hurry(self, job: _J) -> None:
        """Note that the deadline of a job that waits is nearer than it was."""
        self._soonest = min(self._soonest, job.deadline)

    def end_of(self, owner: Hashable, more: float = 0.0) -> float:
        """When an owner would be done with what it has here, and so much more, in virtual time."""
        return max(self._virtual, self._ends.get(owner, (0.0, 0))[0]) + more

    def remove(self, job: _J) -> None:
        """Take a job out that will not be done."""
        self._take_out(job)
        if job.owner in self._ends:
            end, number = self._ends[job.owner]
            self._note_end(job.owner, end - job.cost, number)

    def _take_out(self, job: _J) -> None:
        del self._jobs[job]
        self._small.pop(job, None)
        waiting = self._waiting[job.owner]
        del waiting[bisect_left(waiting, _place(job), key=_place)]
        if not waiting:
            del self._waiting[job.owner]
        self.cost -= job.cost
        if not self._jobs:
            self._virtual, self.cost = 0.0, 0.0
            self._soonest = self._least = math.inf
            self._ends.clear()
            self._turns.clear()

    def _note_end(self, owner: Hashable, end: float, number: int) -> None:
        self._ends[owner] = end, number
        heapq.heappush(self._turns, (self._ends[owner], owner))
        self._noted += 1
        if self._noted < _NOTED + 2 * len(self._jobs):
            return
        self._noted = 0
        self._ends = {
            owner: end
            for owner, end in self._ends.items()
            if end[0] > self._virtual or owner in self._waiting
        }
        self._turns = [(self._ends[owner], owner) for owner in self._waiting]
        heapq.heapify(self._turns)

    def _first_owner(self) -> Hashable:
        """The waiting owner that would be done first; at least one has to wait."""
        while True:
            end, owner = self._turns[0]
            if owner in self._waiting and self._ends[owner] == end:
                return owner
            heapq.heappop(self._turns)

    def _turn(self, job: _J) -> tuple[tuple[float, int], tuple[int, int]]:
        return self._ends[job.owner], _place(job)

    def first(
        self, now: float, rate: float, *, large: bool = True, ahead_s: float = 0.0
    ) -> _J | None:
        """The job that `take` would take first; None if none may run now.

        Args:
            large: whether it may be a large one.
            ahead_s: as of `take`.
        """
        if not self._jobs:
            return None
        if rate > 0 and self._soonest < now + ahead_s + self.cost / rate:
            in_time, late = self._order(now, rate, ahead_s, large=large, only_first=True)
            return next(iter(in_time or late), None)
        # In any order, none will be late.
        job = self._waiting[self._first_owner()][0]
        if _may_run(job, now, large):
            return job
        jobs = self._jobs if large else self._small
        runnable = (job for job in jobs if _may_run(job, now, large))
        return min(runnable, key=self._turn, default=None)

    def take_expired(self, now: float) -> list[_J]:
        """Take out the jobs whose deadline has passed.

        Args:
            now: in seconds of the clock of deadlines.
        """
        if now < self._soonest:
            return []
        expired = [job for job in self._jobs if job.deadline <= now]
        for job in expired:
            self.remove(job)
        self._soonest = min((job.deadline for job in self._jobs), default=math.inf)
        return expired

    def take(
        self,
        now: float,
        bounds: BatchBounds,
        rate: float,
        room_bytes: float,
        *,
        ahead_s: float = 0.0,
        without: Collection[_J] = (),
        idle: bool = False,
    ) -> list[_J]:
        """Take out the jobs to run next, together: all of one group.

        Args:
            bounds: on the batch; its first job may be over the bound on patches.
            rate: cost done in a second; 0 where it is unknown.
            room_bytes: memory for the batch's embeddings.
            ahead_s: until a job is done that is taken now, beside its own cost.
            without: jobs that are not to be taken yet.
            idle: nothing runs, and if only one owner waits, a first job of which no batch has
                more than two is taken alone: it ends sooner, and what follows it not much later.

        Returns:
            Nothing if no job may run now. Expired jobs stay until `take_expired`.
        """
        in_time, late = self._order(now, rate, ahead_s)
        enough = bounds.patches / 3 if idle and len(self._waiting) == 1 else math.inf
        batch: list[_J] = []
        cost, nbytes = 0.0, 0
        for job in in_time or late:
            if job in without:
                continue
            first = batch[0] if batch else None
            if first is not None and (
                job.alone or job.group != first.group or cost + job.cost > bounds.patches
            ):
                continue
            if nbytes + job.nbytes > room_bytes:
                # No smaller one overtakes it, or it might wait for ever.
                break
            batch.append(job)
            cost += job.cost
            nbytes += job.nbytes
            if job.alone or len(batch) == bounds.items or batch[0].cost > enough:
                break
        self.begin(batch)
        return batch

    def begin(self, batch: list[_J]) -> None:
        """Take out jobs that are done now."""
        owners = len(self._waiting)
        for job in batch:
            self._take_out(job)
        if self._jobs and batch:
            self._virtual += sum(job.cost for job in batch) / owners

    def _order(
        self,
        now: float,
        rate: float,
        ahead_s: float,
        *,
        large: bool = True,
        only_first: bool = False,
    ) -> tuple[list[_J], list[_J]]:
        """The jobs of owners that can be done in time, the next first, and all others.

        Args:
            only_first: the rest is not looked at where none of it can be the first.
        """
        in_turn: list[_J] = []
        behind: list[tuple[float, float, list[_J]]] = []
        begin = done_at = now + ahead_s
        # By so much all of `in_turn` may be put off.
        spare_s = math.inf
        for owner in sorted(self._waiting, key=self._ends.__getitem__):
            # Plain loops: a thousand may wait, and this is done for each that is begun.
            jobs, cost, deadline = [], 0.0, math.inf
            for job in self._waiting[owner]:
                if _may_run(job, now, large):
                    jobs.append(job)
                    cost += job.cost
                    deadline = min(deadline, job.deadline)
            if rate <= 0 or not jobs:
                in_turn += jobs
                continue
            needed_s = cost / rate
            if done_at + needed_s > deadline:
                behind.append((deadline, needed_s, jobs))
                continue
            in_turn += jobs
            done_at += needed_s
            spare_s = min(spare_s, deadline - done_at)
            if only_first and spare_s * rate < self._least:
                break
        urgent: list[_J] = []
        late: list[_J] = []
        behind.sort(key=itemgetter(0))
        for deadline, needed_s, jobs in behind:
            if needed_s > spare_s or begin + needed_s > deadline:
                late += jobs
                continue
            urgent += jobs
            begin += needed_s
            spare_s -= needed_s
        return urgent + in_turn, late


def _place(job: Job) -> tuple[int, int]:
    return job.place, job.number


def _may_run(job: Job, now: float, large: bool) -> bool:
    return not job.parked and job.deadline > now and (large or not job.large)


class Utilisation:
    """Spans of time in which one of several towers ran."""

    def __init__(self, towers: int) -> None:
        self._towers = towers
        self._busy: deque[tuple[float, float]] = deque()

    def note(self, began: float, ended: float) -> None:
        """A tower ran; called in the order of the ends.

        Args:
            began, ended: in seconds of one clock.
        """
        self._busy.append((began, ended))
        self._forget(ended - _SPAN_S)

    def share(self, now: float) -> float:
        """Of the last minute, 0 to 1.

        Args:
            now: in seconds of the same clock.
        """
        since = now - _SPAN_S
        self._forget(since)
        busy_s = sum(ended - max(began, since) for began, ended in self._busy)
        return min(busy_s / (_SPAN_S * self._towers), 1.0)

    def _forget(self, before: float) -> None:
        while self._busy and self._busy[0][1] < before:
            self._busy.popleft()
