"""Which items are prepared and run next: plain data, no clock, no tower.

Fair between requests: self-clocked fair queueing (Golestani, INFOCOM 1994). Each job gets
a tag, at which it would be done if every owner had an equal share of the tower, and the
smallest tag goes first; what comes later is counted from the tag that was last reached. A
request of 64 images so takes turns with single images that come after it, in the measure
of what they cost, and has the whole tower when it is alone. (Start tags would let a steady
stream of new requests pass it for ever: each would start where the last one did.)

Deadline-aware: a job that would miss its deadline in that order, and would not if it
went now, goes first; among several the earliest deadline. A job whose deadline has
passed is never returned.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """What may be run together.

    Attributes:
        patches: of a batch of several items; one item may have more.
        items: of a batch.
    """

    patches: int
    items: int

    def __post_init__(self) -> None:
        if self.patches < 1 or self.items < 1:
            raise ValueError("a batch has at least one patch and one item")


@dataclass(eq=False)
class Job:
    """One item's turn at something.

    Attributes:
        owner: the request it is for.
        cost: in patches, or whatever measure all jobs of a queue share.
        deadline: in the clock of whoever asks.
        nbytes: memory that it will take when it has run.
        group: only jobs of equal groups are run together.
        alone: never to be run with others.
        parked: not to be returned now.
        content: the asker's own.
    """

    owner: Hashable
    cost: float
    deadline: float
    nbytes: int = 0
    group: Hashable = None
    alone: bool = False
    parked: bool = False
    content: Any = None
    tag: float = field(default=0.0, repr=False)


class FairQueue:
    """Jobs that wait for their turn."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}
        self._virtual = 0.0
        # The last tag of an owner, if that is later than now.
        self._ends: dict[Hashable, float] = {}
        self.cost = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def push(self, job: Job) -> None:
        """Let a job wait.

        Raises:
            ValueError: it waits already.
        """
        if job in self._jobs:
            raise ValueError("the job waits already")
        job.tag = max(self._virtual, self._ends.get(job.owner, 0.0)) + job.cost
        self._ends[job.owner] = job.tag
        self._jobs[job] = None
        self.cost += job.cost

    def remove(self, job: Job) -> None:
        """Take a job out, whatever its turn.

        Raises:
            KeyError: it does not wait.
        """
        del self._jobs[job]
        self.cost -= job.cost
        if not self._jobs:
            self._virtual, self.cost = 0.0, 0.0
            self._ends.clear()

    def first(self, now: float, rate: float) -> Job | None:
        """The job that `take` would take first; None if none may run now."""
        jobs = [job for job in self._jobs if not job.parked and job.deadline > now]
        if rate > 0 and any(job.deadline < now + self.cost / rate for job in jobs):
            return self._order(now, rate)[0]
        # Whatever the order, nobody will be late.
        return min(jobs, key=lambda job: job.tag, default=None)

    def take_expired(self, now: float) -> list[Job]:
        """Take out the jobs whose deadline has passed."""
        expired = [job for job in self._jobs if job.deadline <= now]
        for job in expired:
            self.remove(job)
        return expired

    def take(self, now: float, bounds: Bounds, rate: float, room_bytes: float) -> list[Job]:
        """Take out the jobs to run next, together: all of one group.

        Args:
            bounds: on the batch; its first job may be over the bound on patches.
            rate: cost done in a second, as far as is known; 0 where it is not.
            room_bytes: memory for what the batch will make.

        Returns:
            Nothing if no job may run now. Expired jobs stay until `take_expired`.
        """
        batch: list[Job] = []
        cost, nbytes = 0.0, 0
        order = self._order(now, rate)
        for job in order:
            first = batch[0] if batch else None
            if first is not None and (
                job.alone or job.group != first.group or cost + job.cost > bounds.patches
            ):
                continue
            if nbytes + job.nbytes > room_bytes:
                # Nobody smaller overtakes it, or it might wait for ever.
                break
            batch.append(job)
            cost += job.cost
            nbytes += job.nbytes
            if job.alone or len(batch) == bounds.items:
                break
        for job in batch:
            self.remove(job)
        if batch and self._jobs:
            # Never past one that was passed, be it for a deadline or for its group.
            reached = max(job.tag for job in batch)
            passed = (job.tag for job in order if job in self._jobs)
            self._virtual = max(self._virtual, min(reached, min(passed, default=reached)))
            self._ends = {o: end for o, end in self._ends.items() if end > self._virtual}
        return batch

    def _order(self, now: float, rate: float) -> list[Job]:
        """The jobs that may run, the next first."""
        jobs = [job for job in self._jobs if not job.parked and job.deadline > now]
        jobs.sort(key=lambda job: job.tag)
        if rate <= 0:
            return jobs
        urgent: list[Job] = []
        others: list[Job] = []
        done_at = now
        for job in jobs:
            done_at += job.cost / rate
            saved = done_at > job.deadline >= now + job.cost / rate
            (urgent if saved else others).append(job)
        urgent.sort(key=lambda job: job.deadline)
        return urgent + others
