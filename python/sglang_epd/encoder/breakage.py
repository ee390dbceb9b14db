"""Tells a tower that is broken from an item that a sound tower fails at.

After some errors a device fails at every later call until its process ends: CUDA's
"sticky" errors (an illegal memory access, an uncorrectable memory error, a lost device).
Which exceptions are of that kind differs by device and driver, so none is recognised here.
Whenever an item fails with an unforeseen error, a probe is run: the device is waited
for, and a picture of our own encoded. If that fails too, the tower is broken, and the item
is not known to be at fault.

Owns the verdict. Neither runs items nor ends anything.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sglang_epd.encoder.tower import TowerBrokenError
from sglang_epd.errors import EpdError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# A batch that runs for longer does not end by itself.
STUCK_S = 300.0
# An accelerator that others use may be out of memory for a moment.
_ATTEMPTS = 2
_PAUSE_S = 1.0


class StuckError(Exception):
    """A call of the tower does not end."""


async def in_time(call: Awaitable[_T], limit_s: float | None) -> _T:
    """The result of a call, or of a part of one.

    Args:
        limit_s: that it may take; None for any time.

    Raises:
        StuckError: it takes longer than `limit_s`.
    """
    try:
        async with asyncio.timeout(limit_s) as patience:
            return await call
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise StuckError(f"a batch takes longer than {limit_s:g} s") from error


class Breakage:
    """Watches the calls of one tower.

    Args:
        probe: runs something that a sound tower succeeds at.
        pause_s: between the attempts of a probe.

    Attributes:
        reason: why the tower is broken; empty while it is not known to be.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        *,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self.reason = ""
        self._probe = probe
        self._pause_s = pause_s
        self._turn = asyncio.Lock()
        # Probes are numbered from 1.
        self._last, self._last_sound = 0, 0

    async def watch(self, call: Awaitable[_T]) -> _T:
        """The call's result.

        Raises:
            TowerBrokenError: the tower is broken, whichever error the call has raised.
            Exception: the call's own; the tower is sound.
        """
        try:
            return await call
        except EpdError:
            raise
        except Exception as error:
            if isinstance(error, StuckError):
                self.reason = str(error)
            else:
                logger.error("The tower failed:\n%s", "".join(traceback.format_exception(error)))
                drop_frames(error)
                await self._judge(error)
            if self.reason:
                raise TowerBrokenError(self.reason) from error
            raise

    async def _judge(self, failure: Exception) -> None:
        known = self._last
        async with self._turn:
            if self._last_sound > known:
                return  # by a probe that began after this failure
            for attempt in range(_ATTEMPTS):
                if self.reason:
                    return
                if attempt:
                    await asyncio.sleep(self._pause_s)
                try:
                    self._last += 1
                    async with asyncio.timeout(STUCK_S):
                        await self._probe()
                    self._last_sound = self._last
                    return
                except Exception as error:
                    drop_frames(error)
                    logger.error("The tower fails at a probe of its own, too: %s", error)
            said = str(failure).partition("\n")[0]
            self.reason = f"it fails at everything ({type(failure).__name__}: {said})"


def drop_frames(error: BaseException) -> None:
    """The frames hold media, or memory on the device that a probe may need."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
