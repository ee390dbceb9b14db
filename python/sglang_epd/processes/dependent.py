"""A process that ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def depend_on(parent: int) -> None:
    """End when the parent does, for any reason, and not by signals of its terminal.

    The kernel sends SIGKILL when the parent's thread that started this process ends.
    SIGINT and SIGTERM, which reach a whole process group, are the parent's to answer.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that this one works for is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def gain_nothing() -> None:
    """No program that this process, or a child of it, may start has more rights than it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
