"""Names of processes: which share this machine's memory, and which of them live."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

_PROC = Path("/proc")


@functools.cache
def _machine() -> str:
    """Names the kernel, PID namespace and user: within one, `/proc/PID/fd` can be opened."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.readlink(_PROC / 'self/ns/pid')}.{os.getuid()}"


def this_process() -> str:
    """Names this process to its peers; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return f"{_machine()}/{os.getpid()}/{_started(os.getpid())}"
    return ""


def shares_memory(process: str) -> bool:
    """Whether the named process can map this process's memory."""
    with contextlib.suppress(OSError):
        return process.startswith(f"{_machine()}/")
    return False


def lives(process: str) -> bool:
    """Whether a process of this machine still runs; a stopped one does.

    Args:
        process: one for which `shares_memory` holds.
    """
    try:
        _, pid, started = process.rsplit("/", 2)
        return _started(int(pid)) == int(started)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    except OSError:
        return True  # it cannot be seen now, for want of descriptors, say: it may be writing


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot: tells it from a later namesake."""
    # pid (comm) state ppid ...; comm may hold spaces and brackets.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[19])
