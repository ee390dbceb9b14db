"""How much of this machine's memory one server may plan with by default.

A host has eight accelerators at most, as a rule, and so eight servers of which each holds
embeddings in host memory. With a sixteenth each they take half of it together, and only when
all are full: neither the arena of a language server nor a queue takes memory before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_SERVERS = 16
_DECODING = 8
# Enough for the tests' models on a laptop; and for 256 pictures of 1080p of the largest models.
LEAST_MB = 2048
MOST_MB = 16_384


def share_mb(memory_bytes: int | None = None) -> int:
    """MiB of embeddings that one language server may hold: a sixteenth of the memory.

    >>> [share_mb(gib << 30) for gib in (16, 64, 128, 512)]
    [2048, 4096, 8192, 16384]

    Args:
        memory_bytes: the machine's own, or its control group's limit, unless given.
    """
    memory = usable_bytes() if memory_bytes is None else memory_bytes
    return min(max(LEAST_MB, (memory >> 20) // _SERVERS), MOST_MB)


def decode_mb(memory_bytes: int | None = None, workers: int = 1) -> int:
    """MiB that one server may decode media in: an eighth of the memory.

    >>> [decode_mb(gib << 30) for gib in (16, 64, 128, 512)]
    [4096, 8192, 16384, 32768]
    >>> decode_mb(1024 << 30, workers=8)
    131072

    Args:
        memory_bytes: the machine's own, or its control group's limit, unless given.
        workers: the server's processes with a tower; each would have a server's share.
    """
    memory = usable_bytes() if memory_bytes is None else memory_bytes
    return min(max(2 * LEAST_MB, (memory >> 20) // _DECODING), 2 * MOST_MB * workers)


def usable_bytes(root: Path = Path("/")) -> int:
    """The memory that this process may use: the machine's, or less where its control group
    says so.

    Args:
        root: below it are `proc` and `sys`.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((physical, *_limits(root)))


def _limits(root: Path) -> Iterator[int]:
    """The memory limit of this process's control groups, of both versions."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and the container's own group the top.
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(top) and (limit := _read(folder / name)):
                yield limit


def _read(path: Path) -> int:
    """A limit in bytes; 0 where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
