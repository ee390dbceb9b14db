"""The memory of this process and all below it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil


def held(pid: int | None = None) -> int:
    """Bytes of a process, this one unless given, and all below it; what they share is counted
    once."""
    total = 0
    me = psutil.Process(pid)
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


class Watch:
    """Sees the most that is held while a block runs, beyond what was held before."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.grown = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        before, over = held(self._pid), threading.Event()

        def look() -> None:
            while not over.wait(0.01):
                self.grown = max(self.grown, held(self._pid) - before)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()
