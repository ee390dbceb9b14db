"""A few daemon threads for calls that block.

The threads of `concurrent.futures` would keep a process from ending for as long as a mount
is gone, or a library waits for a dead peer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Future[Any], Callable[[], Any]]


class Threads:
    """Runs blocking calls for coroutines, at most `count` at a time.

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
            self._started += 1
            name = f"{self._name} {self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        job: Future[_Result] = Future()
        self._jobs.put((job, call))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Let the threads end, each after its present call."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if future.set_running_or_notify_cancel():
                self._running.add(future)
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    self._running.discard(future)
            # Else the last result would stay in memory until the next call.
            del job, future, call
