"""The contract of a store; `folder` and `mooncake` implement it.

A backend moves bytes by name and reports failures. Whether it is asked at all, and how
long it may take, is decided by a breaker. `Threads` run calls that block.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Job = tuple[Future[Any], list[Callable[[], Any]]]
# Failures in a row that open a breaker, and how long it stays open before one call is tried.
_FAILURES = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class StoreError(Exception):
    """The store cannot be reached, is full, or refuses.

    Attributes:
        outcome: how metrics call a read or a write that ends so.
    """

    outcome = "error"


class OversizedError(StoreError):
    """Under that name lies more than may be read."""

    outcome = "too_large"


class StoreBackend(Protocol):
    """Bytes by name. Every call may be cancelled, may be made again, and raises StoreError."""

    async def connect(self) -> None:
        """Be ready to be asked; other calls connect by themselves."""

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        """The bytes under a name (uint8, one dimension, memory of their own), or None.

        Raises:
            OversizedError: more than `max_bytes`, which were not read.
        """

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Keep the pieces, one after the other, under a name: all of them or nothing.

        Args:
            pieces: bytes of one entry, in order; they do not change before the call ends.
        """

    async def remove(self, name: str) -> None:
        """Remove the entry of a name, if there is one."""

    async def close(self) -> None:
        """Let go of connections; calls in flight end by themselves."""


class Threads:
    """Daemon threads that run blocking calls for coroutines, at most `count` at a time.

    Threads of `concurrent.futures` would keep a process from ending for as long as a mount
    is gone, or a library waits for a dead peer.

    Args:
        name: of the threads.
        count: how many; started when they are first needed.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._started = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running: set[Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a call is going on."""
        return bool(self._running)

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """The call's result, or its error.

        A caller that is cancelled returns at once. Its call does not begin, or goes on by
        itself if it has begun.
        """
        if self._started < self._count:
            name = f"{self._name} {self._started + 1}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._started += 1
        job: Future[_Result] = Future()
        calls = [call]
        # One that was cancelled stays in the queue, and would keep what its call holds.
        job.add_done_callback(lambda _: calls.clear())
        self._jobs.put((job, calls))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Let the threads end, each after its present call."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, calls = job
            if future.set_running_or_notify_cancel():
                self._running.add(future)
                try:
                    future.set_result(calls[0]())
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    self._running.discard(future)
            # Else the last result would stay in memory until the next call.
            del job, future, calls


class BreakerState(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class LeftAloneError(StoreError):
    """The breaker is open: nothing was asked."""

    outcome = "skipped"


class Breaker:
    """Asks a store, and counts how that ended: a store that fails again and again is left alone
    for a while.

    closed --failures--> open --pause--> half-open --success--> closed
                           ^                 |
                           +----failure------+      and the pause doubles

    Reads and writes have one each: a store that is full, or may only be read, still answers.

    Args:
        what: "reads" or "writes", for logs.
        clock: seconds that only grow.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until = 0.0
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._failures < _FAILURES:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._probing else BreakerState.OPEN

    @property
    def blocks(self) -> bool:
        """Whether `ask` would ask nothing now."""
        paused = self._probing or self._clock() < self._open_until
        return self._failures >= _FAILURES and paused

    async def ask(self, call: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
        """The answer of a call.

        Raises:
            LeftAloneError: the call was not made.
            TimeoutError: no answer in time.
            StoreError: any other failure of the call.
        """
        if self.blocks:
            call.close()
            raise LeftAloneError("left alone for a while")
        # One at a time: others would wait for a store that may still be gone.
        probe = self._probing = self.state is BreakerState.OPEN
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except TimeoutError:
            self._failed(probe, "no answer in time")
            raise
        except OversizedError:
            self._succeeded(probe)
            raise
        except StoreError as error:
            self._failed(probe, error)
            raise
        except Exception as error:
            # Libraries raise errors of any class, and no request may end of one.
            logger.exception("Store %s failed", self._what)
            self._failed(probe, type(error).__name__)
            raise StoreError(type(error).__name__) from error
        finally:
            # A cancelled probe has said nothing about the store.
            if probe:
                self._probing = False
        self._succeeded(probe)
        return answer

    def _counts(self, probe: bool) -> bool:
        """Whether a call that ended says something new: once open, only a probe does."""
        return probe or self._failures < _FAILURES

    def _succeeded(self, probe: bool) -> None:
        if self._counts(probe):
            self._failures, self._pause_s = 0, _FIRST_PAUSE_S
        if probe:
            logger.info("Store %s are back", self._what)

    def _failed(self, probe: bool, reason: object) -> None:
        if not self._counts(probe):
            return
        self._failures += 1
        if self._failures >= _FAILURES:
            self._open_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            logger.warning("Store %s are left for a while: %s", self._what, reason)
