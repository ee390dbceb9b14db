"""A large request's inline media, read in a thread before the request is planned.

Base64 and digests of hundreds of megabytes would stop the tokenizer's event loop, where all
requests are. SGLang asks for a request's plan in that loop and waits for it, so long work
is done beforehand and found here. Small requests are read when they are planned: a
thread takes longer to wake than they do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from PIL import Image

from sglang_epd.errors import MediaError
from sglang_epd.media import EscapeBudget, MediaSource, digest, parse_source

# About a millisecond of work: so many bytes, or so many small entries.
LARGE_BYTES = 1 << 20
MANY_ENTRIES = 64
# Each has a request's media twice, encoded and decoded; others wait for their turn.
_THREADS = 2


@dataclass(frozen=True)
class Read:
    """One entry of a request's media.

    Attributes:
        place: what the entry says of them, itself, so that no other has its place in memory.
        source: the media, or why they cannot be read.
        digest: of inline bytes; empty of all else.
        sha256: the same, where the request has content hashes.
    """

    place: object
    source: MediaSource | MediaError
    digest: bytes = b""
    sha256: str = ""


_threads = ThreadPoolExecutor(_THREADS, "epd-read")
# Of the current request, by the identity of what an entry says: SGLang makes an entry for each of
# the questions about one image.
_read: ContextVar[dict[int, Read] | None] = ContextVar("sglang_epd_read", default=None)


def is_large(entries: Sequence[object]) -> bool:
    """Whether reading these would be felt by other requests."""
    return len(entries) > MANY_ENTRIES or sum(map(_weight, entries)) > LARGE_BYTES


async def beforehand(entries: Sequence[object], *, hashed: bool) -> None:
    """Read entries in a thread, for the plans of the current task until `forget`.

    Cancelling it leaves nothing behind: a thread's result is dropped.

    Args:
        hashed: whether content hashes will be compared.
    """
    reading = asyncio.get_running_loop().run_in_executor(_threads, _all, entries, hashed)
    _read.set(await reading)


def forget() -> None:
    """The current task's requests are planned."""
    _read.set(None)


def find(entry: object) -> Read | None:
    """The entry's media that were read beforehand; None without any."""
    known, place = _read.get(), _place(entry)
    found = known.get(id(place)) if known else None
    return found if found is not None and found.place is place else None


def _all(entries: Sequence[object], hashed: bool) -> dict[int, Read]:
    escapes = EscapeBudget()
    read = {}
    for entry in entries:
        place = _place(entry)
        if id(place) not in read:
            read[id(place)] = _one(entry, place, escapes, hashed)
    return read


def _one(entry: object, place: object, escapes: EscapeBudget, hashed: bool) -> Read:
    try:
        source = parse_source(entry, escapes)
    except MediaError as error:
        # Not its traceback, which holds the media.
        return Read(place, error.with_traceback(None))
    if source.data is None:
        return Read(place, source)
    sha256 = hashlib.sha256(source.data).hexdigest() if hashed else ""
    return Read(place, source, digest(source.data), sha256)


def _place(entry: Any) -> Any:
    """Where an entry says that its media are: a URL, or they themselves; the entry if nowhere."""
    place = entry.get("url") if isinstance(entry, Mapping) else getattr(entry, "url", entry)
    return entry if place is None else place


def _weight(entry: Any) -> int:
    if isinstance(entry, Image.Image):
        return 3 * entry.width * entry.height
    place = _place(entry)
    return len(place) if isinstance(place, str | bytes | bytearray | memoryview) else 0
