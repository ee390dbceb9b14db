"""What an encoder takes on: items and bytes in work, live requests, and when no more.

Plain data; the service asks before it begins and says when it is done.
"""

from __future__ import annotations

from sglang_epd.errors import (
    DuplicateError,
    MediaTooLargeError,
    OverloadedError,
    UnavailableError,
)


class Admission:
    """Bounds on all requests together.

    Args:
        max_items: items in work at a time.
        max_bytes: encoded media in work at a time.

    Attributes:
        items, nbytes: what is in work now.
        draining: nothing new is taken.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        if max_items < 1 or max_bytes < 1:
            raise ValueError("an encoder takes at least one item and one byte")
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.items = 0
        self.nbytes = 0
        self.draining = False
        self._live: dict[str, int] = {}

    @property
    def live(self) -> int:
        """Requests in work."""
        return len(self._live)

    def check(self, retry_after_s: float) -> None:
        """Before a request is read: is there room for anything at all?

        Args:
            retry_after_s: what the asker is told if there is not.

        Raises:
            UnavailableError: the encoder is being shut down.
            OverloadedError: there is none.
        """
        if self.draining:
            raise UnavailableError("this encoder is shutting down", retry_after_s=retry_after_s)
        if self.items >= self.max_items:
            raise OverloadedError(
                f"{self.items} items in work, at most {self.max_items}",
                retry_after_s=retry_after_s,
            )

    def take_bytes(self, nbytes: int, retry_after_s: float, own: int = 0) -> None:
        """Before bytes of a request are read; `give_bytes` undoes it.

        Args:
            own: the request's own among those in work; where there are no others, it may
                be over the bound.

        Raises:
            OverloadedError: too many are in work.
        """
        if self.nbytes + nbytes > self.max_bytes and self.nbytes > own:
            raise OverloadedError(
                f"{self.nbytes >> 20} MiB of media in work, at most {self.max_bytes >> 20}",
                retry_after_s=retry_after_s,
            )
        self.nbytes += nbytes

    def note_bytes(self, nbytes: int) -> None:
        """Bytes that are there already, over the bound or not."""
        self.nbytes += nbytes

    def give_bytes(self, nbytes: int) -> None:
        assert self.nbytes >= nbytes
        self.nbytes -= nbytes

    def admit(self, request_id: str, items: int, retry_after_s: float) -> None:
        """Take a request on; `leave` undoes it.

        Raises:
            UnavailableError: the encoder is being shut down.
            DuplicateError: one of that id is live.
            MediaTooLargeError: it has more items than may ever be in work at a time.
            OverloadedError: too many items are in work now.
        """
        if request_id in self._live:
            raise DuplicateError(f"request {request_id} is being encoded already")
        if items > self.max_items:
            raise MediaTooLargeError(f"{items} items for one encoder, which takes {self.max_items}")
        self.check(retry_after_s)
        if self.items + items > self.max_items:
            raise OverloadedError(
                f"{self.items} items in work, at most {self.max_items}",
                retry_after_s=retry_after_s,
            )
        self._live[request_id] = items
        self.items += items

    def leave(self, request_id: str) -> None:
        """A request has come to its end, whatever it was."""
        self.items -= self._live.pop(request_id)
