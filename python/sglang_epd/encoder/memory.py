"""Giving freed memory back to the system.

glibc keeps what is freed below the top of its heaps. An encoder frees pictures, patches
and embeddings of a few megabytes by the thousand: after a burst it held 2.2 GB, of which
1.0 GB was free. Media of many megabytes are kept out of these heaps: between them stay holes
that no other fits. What a server has when it begins to serve is kept out of Python's collections.
"""

from __future__ import annotations

import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 4 << 20


def keep_large_apart() -> bool:
    """Have each large block mapped by itself, which is unmapped when it is freed; False where
    the C library cannot.

    glibc does so by itself only until one of up to 32 MiB was freed: from then on blocks of
    that size go to its heaps.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    return tune is not None and bool(tune(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def give_back() -> bool:
    """Return free heap memory to the system; False where the C library cannot.

    Takes some milliseconds, without the interpreter's lock: call it in a thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def keep_for_good() -> None:
    """Have Python's garbage collector pass over all objects that there are now.

    Of the 850,000 that an encoder imports, a full collection took 0.5 s with the interpreter's
    lock held: nothing else ran, `/health` and the fetching of media included.
    """
    gc.collect()
    gc.freeze()
