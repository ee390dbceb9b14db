"""The layouts of each request's media on a prefill server, until its decode server
has asked.

Prefill and decode know a request by its bootstrap room. A room has a slot from the moment its
request is here, and another one when its media are planned. A slot is settled once: with the
layouts, with the request's failure, or with the finding that nothing is known.

Thread-safe: written in the tokenizer's event loop, read in the bootstrap server's. Owns
no sockets, tasks or clocks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_epd.errors import EpdError
from sglang_epd.wire.http import ErrorReply, ItemLayout, LayoutReply, encode_body

MAX_ROOMS = 65_536
MAX_BYTES = 64 << 20
# A decode server asks while the request is encoded; one that asks later than this is too late.
_KEPT_S = 60.0
_GRACE_S = 5.0


def refusal(error: EpdError) -> bytes:
    """The reply about a request that will not be prefilled."""
    return encode_body(LayoutReply(error=ErrorReply(error.code, error.message)))


class Slot:
    """One request's answer. The first to settle it wins; later ones do nothing."""

    def __init__(self, board: Board, room: int, expires_at: float) -> None:
        self._board = board
        self.room = room
        self.expires_at = expires_at
        self.settled = False
        # A sealed LayoutReply; None once settled means that nothing is known.
        self.body: bytes | None = None

    def learnt(self, layouts: Sequence[ItemLayout | None]) -> None:
        """The media were delivered; one entry an item, None where its layout is unknown."""
        known = [layout for layout in layouts if layout is not None]
        complete = len(known) == len(layouts)
        self._board.settle(self, encode_body(LayoutReply(known)) if complete else None)

    def failed(self, error: EpdError) -> None:
        """The request will not be prefilled."""
        self._board.settle(self, refusal(error))

    def unplanned(self) -> None:
        """Its prompt has no media to be encoded."""
        self._board.settle(self, None)


class Board:
    """The slots by room, bounded in number, bytes and time. Over a bound those go first that are
    settled, the oldest of them first: others are waited for.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_rooms: int = MAX_ROOMS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._max_rooms = max_rooms
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # In order, so that the first is at hand: a dict walks over the places of removed ones.
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        # Those of them that are settled, by when.
        self._settled: OrderedDict[int, None] = OrderedDict()
        self._bytes = 0
        self._watchers: dict[int, list[Callable[[], None]]] = {}

    def open(self, room: int, ttl_s: float) -> Slot:
        """A new slot for a room, in place of the one it may have had. It is gone after `ttl_s`, by
        which the request's own deadline has settled it, or nothing was planned of it.

        Args:
            room: bootstrap room of the request.
        """
        slot = Slot(self, room, self._clock() + ttl_s + _GRACE_S)
        with self._lock:
            self._remove(room)
            self._slots[room] = slot
            self._shrink()
        self._changed(room)
        return slot

    def settle(self, slot: Slot, body: bytes | None) -> None:
        """Answer a slot, unless it is answered.

        Args:
            body: encoded layouts, or the failure; None where the layouts will not be known.
        """
        with self._lock:
            if slot.settled:
                return
            slot.settled = True
            slot.body = body
            # A decode server asks for a batch's prompts one after the other.
            slot.expires_at = max(slot.expires_at, self._clock() + _KEPT_S)
            if self._slots.get(slot.room) is slot:
                self._bytes += len(body or b"")
                self._settled[slot.room] = None
                self._shrink()
        self._changed(slot.room)

    def look(self, room: int) -> Slot | None:
        """The room's slot, if it has one."""
        with self._lock:
            slot = self._slots.get(room)
            return slot if slot is not None and slot.expires_at > self._clock() else None

    @contextmanager
    def watched(self, room: int, changed: Callable[[], None]) -> Iterator[None]:
        """Have `changed` called, in any thread, whenever the room's slot does."""
        with self._lock:
            self._watchers.setdefault(room, []).append(changed)
        try:
            yield
        finally:
            with self._lock:
                watchers = self._watchers[room]
                watchers.remove(changed)
                if not watchers:
                    del self._watchers[room]

    def _changed(self, room: int) -> None:
        with self._lock:
            watchers = list(self._watchers.get(room, ()))
        for changed in watchers:
            changed()

    def _shrink(self) -> None:
        now = self._clock()
        for some in (self._settled, self._slots):
            while some and self._slots[first := next(iter(some))].expires_at <= now:
                self._remove(first)
        while len(self._slots) > self._max_rooms or self._bytes > self._max_bytes:
            self._remove(next(iter(self._settled or self._slots)))

    def _remove(self, room: int) -> None:
        slot = self._slots.pop(room, None)
        self._settled.pop(room, None)
        if slot is not None:
            self._bytes -= len(slot.body or b"")
