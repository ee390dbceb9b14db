"""The content's digest of each URL when it was last read, and how long that may be used.

A URL never names content here. It leads to a digest, for as long as HTTP caching lets it
(`media.freshness`), and the digest names the content. Sends no request and holds no media.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from sglang_epd.media import MediaSource, Trail, display


@dataclass
class Remembered:
    """One URL.

    Attributes:
        shown: the URL as people may see it, without credentials and query.
        digest, nbytes: of the content (`media.digest`).
        trail: how it was come by, and until when it may be used without asking.
        uses: how often it was looked up.
    """

    shown: str
    digest: bytes
    nbytes: int
    trail: Trail = field(repr=False)
    uses: int = 0


class UrlMemory:
    """An LRU memory of URLs, by `name_of`.

    Args:
        capacity: URLs that are remembered at most; each takes a few KiB at most.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._urls: OrderedDict[bytes, Remembered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._urls)

    def entries(self) -> Iterator[tuple[bytes, Remembered]]:
        """Names and their entries; the next to be evicted first."""
        yield from self._urls.items()

    def find(self, name: bytes) -> Remembered | None:
        found = self._urls.get(name)
        if found is not None:
            self._urls.move_to_end(name)
            found.uses += 1
        return found

    def keep(self, name: bytes, url: str, digest: bytes, nbytes: int, trail: Trail) -> None:
        """Remember content that has just been read, in place of the earlier entry; `trail` has
        the answers on the way to it, with their lifetimes.

        Args:
            name: of the URL, by `name_of`.
            digest, nbytes: of the content.
            trail: the answers on the way to it, with their lifetimes.
        """
        before = self._urls.pop(name, None)
        shown = display(MediaSource(url=url))
        uses = before.uses if before is not None else 0
        self._urls[name] = Remembered(shown, digest, nbytes, trail, uses)
        if len(self._urls) > self.capacity:
            self._urls.popitem(last=False)

    def drop(self, name: bytes) -> bool:
        """Forget one URL; False if it is not known."""
        return self._urls.pop(name, None) is not None

    def clear(self) -> int:
        """Forget all; how many there were."""
        count = len(self._urls)
        self._urls.clear()
        return count


def name_of(url: str) -> bytes:
    """The name of a URL: a digest, since a URL may be long, and hold secrets."""
    return blake3(url.encode()).digest()
