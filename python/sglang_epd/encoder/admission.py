"""Admission: bounds on items and bytes in work and on live requests, and its refusals.

Plain data; the service asks before it begins and says when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_epd.errors import (
    DuplicateError,
    MediaTooLargeError,
    OverloadedError,
    UnavailableError,
)

# Most items that a person's question has.
_FEW = 16
# So many times as many items as are in work may wait for their receivers' memory.
_WAITING = 8


@dataclass
class _Live:
    """A request in work: its items that have not ended, and of them those to be fetched."""

    items: int
    fetching: int


class Admission:
    """Bounds on all requests together.

    Hosts decide how long fetching takes, so fetched media do not fill them: a quarter of the
    items, and of the bytes, is left to media that come inline. Requests of many items do not
    fill them either, and leave a quarter to those of few.

    Items that wait for a receiver's memory are not in work. That memory comes free when another
    request has all of its items there, and that request may need this encoder for the rest.

    Attributes:
        max_items, items: in work at a time, and now.
        max_bytes, nbytes: of encoded media in work at a time, and now. Fetched media are added
            over the bound as well; users of `take_bytes` subtract what they took.
        fetching: of the items, those whose media are not here yet.
        waiting: items that wait for their receivers' memory.
        draining: nothing new is taken.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.items = 0
        self.fetching = 0
        self.waiting = 0
        self.nbytes = 0
        self.draining = False
        self._live: dict[str, _Live] = {}

    @property
    def max_fetching(self) -> int:
        """Of `max_items`, those whose media are not here yet."""
        return _share(self.max_items)

    @property
    def max_fetched_bytes(self) -> int:
        """The part of `max_bytes` that fetched media may take."""
        return _share(self.max_bytes)

    @property
    def live(self) -> int:
        """Requests in work."""
        return len(self._live)

    def check(self) -> None:
        """Before a request is read: is there room for anything at all?

        Raises:
            UnavailableError: the encoder is being shut down.
            OverloadedError: there is none.
        """
        if self.draining:
            raise UnavailableError("this encoder is shutting down")
        if self.items >= self.max_items:
            raise OverloadedError(f"{self.items} items in work, at most {self.max_items}")

    def take_bytes(self, nbytes: int, own: int = 0) -> None:
        """Count bytes of a request before they are read.

        Args:
            own: the request's own among those in work; where there are no others, it may
                be over the bound.

        Raises:
            OverloadedError: too many are in work.
        """
        if self.nbytes + nbytes > self.max_bytes and self.nbytes > own:
            raise OverloadedError(
                f"{self.nbytes >> 20} MiB of media in work, at most {self.max_bytes >> 20}"
            )
        self.nbytes += nbytes

    def admit(self, request_id: str, items: int, urls: int = 0) -> None:
        """Take a request on; `leave` undoes it.

        Args:
            urls: how many of its items are to be fetched.

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
        if urls > self.max_fetching:
            raise MediaTooLargeError(
                f"{urls} URLs for one encoder, which fetches {self.max_fetching}"
            )
        self.check()
        most = self.max_items if items <= _FEW else max(items, _share(self.max_items))
        if self.items + items > most:
            raise OverloadedError(f"{self.items} items in work, at most {most}")
        # As many places as a request of several takes are left free for others.
        if self.fetching and self.fetching + max(0, 2 * urls - 1) > self.max_fetching:
            raise OverloadedError(
                f"{self.fetching} items being fetched, at most {self.max_fetching}"
            )
        self._live[request_id] = _Live(items, urls)
        self.items += items
        self.fetching += urls

    def note_fetched(self, request_id: str) -> None:
        """The media of one of its items are here, or will not be."""
        self._live[request_id].fetching -= 1
        self.fetching -= 1

    @contextmanager
    def awaiting_memory(self, request_id: str) -> Iterator[None]:
        """While one of its items waits for its receiver's memory; nothing else is done for it.

        Raises:
            OverloadedError: too many wait, or so many bytes are in work that those which wait
                would leave too few to others.
        """
        if self.waiting >= _WAITING * self.max_items or self.nbytes > _share(self.max_bytes):
            raise OverloadedError(
                f"{self.waiting} items wait for receivers' memory, "
                f"{self.nbytes >> 20} MiB of media in work"
            )
        self._move(request_id, -1)
        try:
            yield
        finally:
            self._move(request_id, 1)

    def _move(self, request_id: str, items: int) -> None:
        self._live[request_id].items += items
        self.items += items
        self.waiting -= items

    def note_ended(self, request_id: str) -> None:
        """One of its items is done, with any outcome."""
        self._live[request_id].items -= 1
        self.items -= 1

    def leave(self, request_id: str) -> None:
        """A request has ended, in any way."""
        left = self._live.pop(request_id)
        self.items -= left.items
        self.fetching -= left.fetching


def _share(most: int) -> int:
    return max(1, most * 3 // 4)
