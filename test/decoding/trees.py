"""The memory of this process and all below it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import psutil


def held() -> int:
    """Bytes of this process and its children, what they share counted once."""
    total = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


class Watch:
    """Sees the most that is held while a block runs, beyond what was held before."""

    grown = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        before, over = held(), threading.Event()

        def look() -> None:
            while not over.wait(0.01):
                self.grown = max(self.grown, held() - before)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()
