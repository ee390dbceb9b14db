"""How fast this server's own tower is, from the scheduler that runs it to the tokenizer
process that decides whether it should.

The figures lie in a small file of the server's own folder: written with one call, so that
a reader finds all of one moment.

Leans on the models' towers being `torch.nn.Module`s that are called with the patches,
one a row, as their first tensor (`vision_weights` knows their names). Of a tower that is
called otherwise nothing is learnt.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_epd.device.cuda import timestamp
from sglang_epd.seams import rundir

logger = logging.getLogger(__name__)

_FIGURES = struct.Struct("<dd")  # patches a second, time of the measurement
_FADE = 0.9
# The first forward of a process also compiles, allocates and warms up.
_SKIPPED = 1
# Older figures expire, so that a tower that was slow once is tried again.
_VALID_S = 60.0
_MAX_PENDING = 64


def path() -> Path:
    """The file; in the folder that only this user may enter."""
    return rundir.control_path().parent / "tower"


def read(file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> float:
    """Patches a second of this server's tower; 0 where nothing is known of it now."""
    try:
        rate, at = _FIGURES.unpack((file or path()).read_bytes())
    except (FileNotFoundError, struct.error):
        return 0.0
    return float(rate) if 0.0 <= clock() - at < _VALID_S else 0.0


class TowerWatch:
    """Measures a tower's forward passes; on an accelerator without waiting for them.

    Args:
        file: where the figures go.
        clock: seconds, the same for all processes of the machine.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._clock = clock
        self._patches = self._seconds = 0.0
        self._seen = 0
        self._began: Any = None
        # On an accelerator: (patches, begin, end) of forward passes that may still run.
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=_MAX_PENDING)

    def watch(self, towers: Iterable[nn.Module]) -> None:
        """Measure these from now on."""
        for tower in towers:
            tower.register_forward_pre_hook(self._begin, with_kwargs=True)
            tower.register_forward_hook(self._end, with_kwargs=True)

    def _begin(self, _tower: nn.Module, args: Any, kwargs: Any) -> None:
        rows = _rows(args, kwargs)
        self._began = None
        if rows is not None:
            self._began = timestamp() if rows.is_cuda else self._clock()

    def _end(self, _tower: nn.Module, args: Any, kwargs: Any, _output: Any) -> None:
        rows, began = _rows(args, kwargs), self._began
        self._began = None
        if rows is None or began is None:
            return
        if rows.is_cuda:
            self._pending.append((len(rows), began, timestamp()))
            while self._pending and self._pending[0][2].query():
                patches, first, last = self._pending.popleft()
                self._learn(patches, first.elapsed_time(last) / 1e3)
        else:
            self._learn(len(rows), self._clock() - began)

    def _learn(self, patches: int, seconds: float) -> None:
        self._seen += 1
        if self._seen <= _SKIPPED or seconds <= 0 or not patches:
            return
        self._patches = self._patches * _FADE + patches
        self._seconds = self._seconds * _FADE + seconds
        os.pwrite(self._file, _FIGURES.pack(self._patches / self._seconds, self._clock()), 0)


def _rows(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The patches of a call, one a row."""
    first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
    return first if first is not None and first.dim() == 2 else None
