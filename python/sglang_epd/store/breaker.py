"""A circuit breaker: a store that fails again and again is left alone for a while.

closed --failures--> open --pause--> half-open --success--> closed
                       ^                 |
                       +----failure------+      and the pause doubles
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sglang_epd.store.backend import OversizedError, StoreError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# Failures in a row that open it, and how long it stays open before one call is tried.
_FAILURES = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class State(enum.Enum):
    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class LeftAloneError(StoreError):
    """The breaker is open: nothing was asked."""

    outcome = "skipped"


class Breaker:
    """Asks a store, and counts how that ended.

    Reads and writes have one each: a store that is full, or may only be read, still answers.

    Args:
        what: "reads" or "writes", for logs.
        clock: seconds that only grow.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until = 0.0
        self._probing = False

    @property
    def state(self) -> State:
        if self._failures < _FAILURES:
            return State.CLOSED
        return State.HALF_OPEN if self._probing else State.OPEN

    @property
    def blocks(self) -> bool:
        """Whether `ask` would ask nothing now."""
        paused = self._probing or self._clock() < self._open_until
        return self._failures >= _FAILURES and paused

    async def ask(self, call: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
        """The answer of a call.

        Raises:
            LeftAloneError: the call was not made.
            TimeoutError: no answer in time.
            StoreError: any other failure of the call.
        """
        if self.blocks:
            call.close()
            raise LeftAloneError("left alone for a while")
        # One at a time: others would wait for a store that may still be gone.
        probe = self._probing = self.state is State.OPEN
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except TimeoutError:
            self._failed(probe, "no answer in time")
            raise
        except OversizedError:
            self._succeeded(probe)
            raise
        except StoreError as error:
            self._failed(probe, error)
            raise
        except Exception as error:
            # Libraries raise errors of any class, and no request may end of one.
            logger.exception("Store %s failed", self._what)
            self._failed(probe, type(error).__name__)
            raise StoreError(type(error).__name__) from error
        finally:
            # A cancelled probe has said nothing about the store.
            if probe:
                self._probing = False
        self._succeeded(probe)
        return answer

    def _counts(self, probe: bool) -> bool:
        """Whether a call that ended says something new: once open, only a probe does."""
        return probe or self._failures < _FAILURES

    def _succeeded(self, probe: bool) -> None:
        if self._counts(probe):
            self._failures, self._pause_s = 0, _FIRST_PAUSE_S
        if probe:
            logger.info("Store %s are back", self._what)

    def _failed(self, probe: bool, reason: object) -> None:
        if not self._counts(probe):
            return
        self._failures += 1
        if self._failures >= _FAILURES:
            self._open_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            logger.warning("Store %s are left for a while: %s", self._what, reason)
