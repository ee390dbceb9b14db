"""A semaphore of bytes, first come first served, for threads."""

from __future__ import annotations

import threading
import time
from collections import deque

from sglang_epd.errors import (
    DeadlineError,
    MediaTooLargeError,
    OverloadedError,
    RequestCancelledError,
)


class Charge:
    """Bytes that one item may use; its own until they are given back.

    Attributes:
        stopped: set by `Budget.stop`: a thread that waits for it raises.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.stopped = False


class Budget:
    """Shares `total` bytes out.

    One that holds bytes and needs more goes before those that hold none. Only one such may
    wait: two could wait for each other.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._changed = threading.Condition()
        self._queue: deque[Charge] = deque()
        self._growing = False

    @property
    def waiting(self) -> int:
        """How many wait for bytes."""
        return len(self._queue)

    @property
    def used(self) -> int:
        return self.total - self._free

    def try_raise(self, charge: Charge, nbytes: int) -> bool:
        """Make a charge `nbytes`; False while others wait or there is not as much.

        Args:
            nbytes: all that the charge is to hold, those included that it has.

        Raises:
            MediaTooLargeError: there never are.
        """
        self._check(nbytes)
        with self._changed:
            more = nbytes - charge.nbytes
            if more > 0 and (self._queue or more > self._free):
                return False
            self._take(charge, more)
            if more < 0:
                self._changed.notify_all()
            return True

    def raise_to(self, charge: Charge, nbytes: int, deadline: float) -> None:
        """Make a charge `nbytes`, when it is its turn.

        Args:
            deadline: in seconds of `time.monotonic`.

        Raises:
            MediaTooLargeError: it is more than there is.
            OverloadedError: it has some already, and another such waits.
            DeadlineError: the deadline passed, by `time.monotonic`.
            RequestCancelledError: it was stopped.
        """
        if self.try_raise(charge, nbytes):
            return
        with self._changed:
            if charge.nbytes:
                if self._growing:
                    raise OverloadedError("too many large media are being decoded")
                self._growing = True
                self._queue.appendleft(charge)
            else:
                self._queue.append(charge)
            held = charge.nbytes
            try:
                while self._queue[0] is not charge or nbytes - held > self._free:
                    left = deadline - time.monotonic()
                    if charge.stopped:
                        raise RequestCancelledError("it is no longer wanted")
                    if left <= 0:
                        raise DeadlineError(
                            "the request's deadline passed while large media were decoded"
                        )
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                self._take(charge, nbytes - held)
            finally:
                self._queue.remove(charge)
                if held:
                    self._growing = False
                self._changed.notify_all()

    def stop(self, charge: Charge) -> None:
        """Have the thread that waits with this charge raise."""
        with self._changed:
            charge.stopped = True
            self._changed.notify_all()

    def release(self, charge: Charge) -> None:
        """Give all of it back."""
        with self._changed:
            self._take(charge, -charge.nbytes)
            self._changed.notify_all()

    def _take(self, charge: Charge, more: int) -> None:
        self._free -= more
        charge.nbytes += more

    def _check(self, nbytes: int) -> None:
        if nbytes > self.total:
            raise MediaTooLargeError(
                f"decoding it takes {nbytes >> 20} MiB, and this server has {self.total >> 20} for "
                "one item (SGLANG_EPD_DECODE_MB)"
            )
