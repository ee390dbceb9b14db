"""How this process's allocator and its collector of garbage are set, and memory given back.

glibc keeps freed memory below the top of its heaps. An encoder frees pictures, patches
and embeddings of a few megabytes by the thousand: after a burst it held 2.2 GB, of which
1.0 GB was free. Media of many megabytes are kept out of these heaps: between them stay holes
that no other fits. What a server has when it begins to serve is kept out of Python's collections.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable
from typing import NoReturn

logger = logging.getLogger(__name__)

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8
_LARGE_BYTES = 4 << 20
_LARGEST_BYTES = 1 << 30
_EVERY_S = 10.0
_TURNS_UNDER_LOAD = 30
_MOST_KEPT_BYTES = (1 << 31) - 1  # the C library takes an int


def keep_large_apart() -> bool:
    """Have each large block mapped by itself, which is unmapped when it is freed; False where
    the C library cannot.

    glibc does so by itself only until one of up to 32 MiB was freed: from then on blocks of
    that size go to its heaps.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def keep_freed() -> bool:
    """Have large blocks taken from one heap that keeps what is freed; False where the C library
    cannot.

    For a server that has a tower. Pages that are new cost more than what is written to them:
    preparing a picture of 1080p for a GPU took 59 ms of a processor and takes 29 ms of it, and
    copying its embedding in Qwen3-VL-8B 35 ms and 7 ms. A narrow tower on a CPU took 9 ms for
    a picture of 448 px and takes 5 ms. Threads that began before this have heaps of their own.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and all(
        tune(name, value)
        for name, value in (
            (_M_MMAP_THRESHOLD, _LARGEST_BYTES),
            (_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES),
            # Others hold no block of 64 MiB, and give back what is freed at their ends.
            (_M_ARENA_MAX, 1),
        )
    )


def give_back() -> bool:
    """Return free heap memory to the system; False where the C library cannot.

    Takes some milliseconds, without the interpreter's lock: call it in a thread. A heap of
    gigabytes takes a tenth of a second for each, in which no thread gets memory of it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


async def give_back_in_time(finished: Callable[[], int], *, on_cpu: bool) -> NoReturn:
    """Give memory back for as long as this is awaited, when something has been finished.

    On an accelerator the next item would wait for new pages (`keep_freed`), and all that needs
    memory for this: there while nothing is finished, and else every five minutes.

    Args:
        finished: how much this process has done so far.
    """
    tidy_at = before = finished()
    turn = 0
    while True:
        turn += 1
        await asyncio.sleep(_EVERY_S)
        now = finished()
        quiet, before = now == before, now
        if now != tidy_at and (on_cpu or quiet or turn % _TURNS_UNDER_LOAD == 0):
            tidy_at = now
            try:
                await asyncio.to_thread(give_back)
            except Exception:
                logger.exception("Free memory is kept for now")


def keep_for_good() -> None:
    """Have Python's garbage collector pass over all objects that there are now.

    Of the 850,000 that an encoder imports, a full collection took 0.5 s with the interpreter's
    lock held: nothing else ran, `/health` included. Those of 768 items in work took 0.1 to 0.2 s,
    three times in eight seconds; from now on there is one a fifth as often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)
