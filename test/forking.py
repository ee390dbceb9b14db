"""Processes that tests fork, because what they need is imported here."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any


def fork(target: Callable[..., object], *args: Any) -> BaseProcess:
    """Start a daemon.

    It collects none of this process's garbage: gRPC's channels, of an earlier test, wait for ever
    where their threads are not.
    """
    process = multiprocessing.get_context("fork").Process(target=target, args=args, daemon=True)
    gc.freeze()
    process.start()
    gc.unfreeze()
    return process
