"""The content's digest of each URL when it was last read, and how long that may be used.

A URL never names content here. It leads to a digest, for as long as HTTP caching lets it
(`media.freshness`), and the digest names the content. Sends no request and holds no media.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from blake3 import blake3

from sglang_epd.media import Trail


@dataclass
class Remembered:
    """One URL.

    Attributes:
        digest, nbytes: of the content (`media.digest`).
        trail: how it was come by, and until when it may be used without asking.
    """

    digest: bytes
    nbytes: int
    trail: Trail


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

    def find(self, name: bytes) -> Remembered | None:
        found = self._urls.get(name)
        if found is not None:
            self._urls.move_to_end(name)
        return found

    def keep(self, name: bytes, digest: bytes, nbytes: int, trail: Trail) -> None:
        """Remember content that has just been read, in place of the earlier entry.

        Args:
            name: of the URL, by `name_of`.
            digest, nbytes: of the content.
            trail: the answers on the way to it, with their lifetimes.
        """
        self._urls[name] = Remembered(digest, nbytes, trail)
        self._urls.move_to_end(name)
        if len(self._urls) > self.capacity:
            self._urls.popitem(last=False)

    def drop(self, name: bytes) -> None:
        """Forget a URL, if it is known."""
        self._urls.pop(name, None)

    def clear(self) -> int:
        """Forget all; how many there were."""
        count = len(self._urls)
        self._urls.clear()
        return count


def name_of(url: str) -> bytes:
    """The name of a URL: a digest, since a URL may be long, and hold secrets."""
    return blake3(url.encode()).digest()
