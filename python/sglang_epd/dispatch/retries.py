"""How often work may be sent again: retries never add more than a share to the load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

# Retries per item that was sent for the first time, and a fixed rate besides: enough
# for all that one encoder may have had when it died.
_SHARE = 0.2
_BURST = 128.0
_PER_S = 10.0
_PAUSE_S = (0.05, 2.0)


class RetryBudget:
    """Tokens that first tries and time bring in, and retries use up.

    An empty budget delays retries, it refuses none: a request's deadline does.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = _BURST
        self._at = clock()

    def sent(self, items: int) -> None:
        """So many items were sent for the first time."""
        self._refill(items * _SHARE)

    def take(self, items: int) -> float:
        """Use the tokens of so many retries.

        Returns:
            Seconds to wait before; 0 while there are tokens.
        """
        self._refill(0.0)
        self._tokens -= items
        return max(0.0, -self._tokens / _PER_S)

    def _refill(self, tokens: float) -> None:
        now = self._clock()
        self._tokens = min(_BURST, self._tokens + tokens + (now - self._at) * _PER_S)
        self._at = now


def pause(number: int, rng: random.Random) -> float:
    """Seconds before the `number`-th return to encoders that have failed: exponential, and
    drawn between nothing and all of it, so that requests that failed together do not return
    together."""
    least, most = _PAUSE_S
    return least + rng.random() * (min(most, least * 2.0 ** min(number, 30)) - least)
