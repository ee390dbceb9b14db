"""One direction of a store, reading or writing, behind its breaker and a deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from sglang_epd.store.backend import OversizedError, StoreError
from sglang_epd.store.breaker import Breaker, State

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class LeftAloneError(StoreError):
    """The breaker is open: nothing was asked."""


class Calls:
    """Asks the store, and tells the breaker how that ended.

    Reads and writes have one each: what is full, or may only be read, still answers.

    Args:
        what: "reads" or "writes", for logs.
        breaker: of this direction.
    """

    def __init__(self, what: str, breaker: Breaker) -> None:
        self._what = what
        self.breaker = breaker

    async def ask(self, call: Coroutine[Any, Any, _Result], until: float) -> _Result:
        """What the call answers.

        Args:
            until: in seconds of the event loop's clock.

        Raises:
            LeftAloneError: see there.
            TimeoutError: no answer by then; the breaker has been told.
            StoreError: any other failure; likewise, unless it is an OversizedError.
        """
        breaker = self.breaker
        if not breaker.admits(time.monotonic()):
            call.close()
            raise LeftAloneError("left alone for a while")
        try:
            async with asyncio.timeout_at(until):
                answer = await call
        except TimeoutError:
            self._failed("no answer in time")
            raise
        except OversizedError:
            self._succeeded()
            raise
        except StoreError as error:
            self._failed(error)
            raise
        except Exception as error:
            # Others' libraries raise what they like, and no request may end of it.
            logger.exception("Store %s failed", self._what)
            self._failed(type(error).__name__)
            raise StoreError(type(error).__name__) from error
        except BaseException:
            breaker.left_open()
            raise
        self._succeeded()
        return answer

    def _failed(self, reason: object) -> None:
        before = self.breaker.state
        self.breaker.failed(time.monotonic())
        if before is not State.OPEN and self.breaker.state is State.OPEN:
            logger.warning("Store %s are left for a while: %s", self._what, reason)

    def _succeeded(self) -> None:
        before = self.breaker.state
        self.breaker.succeeded()
        if before is State.HALF_OPEN:
            logger.info("Store %s are back", self._what)
