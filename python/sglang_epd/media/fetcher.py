"""What any fetcher may read, and how it is asked.

The rules of a URL are applied here, on every hop and to what is remembered; a `MediaFetcher`
reads, in the process that it is in, and a `FetchingProcess` has one in another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from yarl import URL

from sglang_epd.errors import DeadlineError, MediaError, MediaForbiddenError, MediaTooLargeError
from sglang_epd.media.address import AddressPolicy
from sglang_epd.media.freshness import Trail
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.slots import Account
from sglang_epd.media.source import MediaSource, digest, display

# Hashing less than this (0.1 ms) is cheaper than handing it to a thread.
_INLINE_HASH_BYTES = 256 << 10
_NO_TRAIL = Trail(())
# Those of RFC 3986's path and query that `quote` would escape, and escapes.
_URL_CHARACTERS = "!$&'()*+,/:;=?@~"
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class FetchedMedia:
    """An item's encoded bytes.

    Attributes:
        data: the encoded media.
        digest: its blake3 digest, 32 bytes.
        trail: the answers on the way to a URL's, to be remembered; other media have none.
    """

    data: bytes = field(repr=False)
    digest: bytes
    trail: Trail = _NO_TRAIL


@asynccontextmanager
async def reading_until(deadline: float, source: MediaSource) -> AsyncIterator[None]:
    """The time that a request leaves for reading an item.

    Args:
        deadline: in seconds of `time.monotonic()`.

    Raises:
        DeadlineError: it passed first.
    """
    try:
        left_s = deadline - time.monotonic()
        if left_s <= 0:  # asyncio.timeout acts at the first wait only
            raise TimeoutError
        async with asyncio.timeout(left_s):
            yield
    except TimeoutError:
        raise DeadlineError(f"the deadline passed while reading {display(source)}") from None


class Fetcher(ABC):
    """Reads media, inside its async context.

    Args:
        limits: media that may be read.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._policy = AddressPolicy(limits.allowed_networks)
        self._domains = tuple(map(_canonical_host, limits.allowed_domains))
        self._hosts_allowed = frozenset(map(_canonical_host, limits.allowed_hosts))
        self._max_url_bytes = limits.max_url_bytes or limits.max_bytes

    @abstractmethod
    async def ask(self, source: MediaSource, account: Account | None = None) -> FetchedMedia:
        """Read a URL and hash its content.

        There is no deadline but `limits.total_timeout_s`, from when there is a slot: callers
        may have different ones.

        Args:
            source: a URL.
            account: is asked for room before anything is read, and while bytes arrive
                before more are read. The time that it takes is not the host's.

        Raises:
            MediaError, UnavailableError: as of `fetch`.
        """

    async def fetch(
        self, source: MediaSource, deadline: float, account: Account | None = None
    ) -> FetchedMedia:
        """Read an item's bytes and hash them.

        Args:
            source: inline bytes are only checked and hashed.
            deadline: the request's, in seconds of `time.monotonic()`.
            account: as of `ask`.

        Raises:
            MediaForbiddenError: the URL leads to an address, domain or file that may
                not be read.
            MediaTooLargeError: there are more bytes than the limits say.
            MediaError: the host, or its answer, is at fault; or it took longer than
                `limits.total_timeout_s`.
            UnavailableError: there is no process to read in.
            DeadlineError: the deadline passed first.
        """
        async with reading_until(deadline, source):
            if source.url is None:
                return await hashed(self._check_inline(source))
            return await self.ask(source, account)

    def check(self, trail: Trail, nbytes: int) -> None:
        """Whether media that were come by on this trail may be used now, without asking.

        The rules are those of a fetch, but for the addresses of names: nothing is
        connected to.

        Args:
            nbytes: how large they are.

        Raises:
            MediaError: as of `fetch`.
        """
        for step in trail.steps:
            host = self._check_url(parse(step.url))
            if _is_address(host) and not self._policy.permits(host):
                raise MediaForbiddenError(f"host {host} is not at a public address")
        if len(trail.steps) > self._limits.max_redirects + 1:
            raise self._too_many_redirects(host)
        if nbytes > self._max_url_bytes:
            raise too_large(f"media of {nbytes} bytes from {host}", self._max_url_bytes)

    def _check_inline(self, source: MediaSource) -> bytes:
        data = source.data or b""
        check_not_empty(data, "the media")
        if len(data) > self._limits.max_bytes:
            raise too_large(f"inline media of {len(data)} bytes", self._limits.max_bytes)
        return data

    def _check_url(self, url: URL) -> str:
        """The host of a URL that may be asked; its addresses are judged on connecting."""
        host = url.raw_host
        if url.scheme not in ("http", "https"):
            raise MediaForbiddenError(f"only http and https is fetched, not {url.scheme[:20]!r}")
        if not host:
            raise MediaError("the media URL names no host")
        name = host.lower().rstrip(".")
        if len(name) > 253:
            raise MediaError("the media URL's host name is too long")
        if not self._allows(name):
            raise MediaForbiddenError(f"host {host} is not in the allowed domains")
        return host

    def _allows(self, name: str) -> bool:
        if not self._domains and not self._hosts_allowed:
            return True
        return name in self._hosts_allowed or any(
            name == domain or name.endswith("." + domain) for domain in self._domains
        )

    def _too_many_redirects(self, host: str) -> MediaError:
        return MediaError(
            f"more than {self._limits.max_redirects} redirects, the last to {host}",
            reason="redirects",
        )


async def hashed(data: bytes, trail: Trail = _NO_TRAIL) -> FetchedMedia:
    """The media that these bytes are."""
    if len(data) < _INLINE_HASH_BYTES:
        return FetchedMedia(data, digest(data), trail)
    return FetchedMedia(data, await asyncio.to_thread(digest, data), trail)


def too_large(what: str, limit: int) -> MediaTooLargeError:
    return MediaTooLargeError(f"{what} is over the limit of {limit} bytes")


def check_not_empty(data: bytes, what: str) -> None:
    if not data:
        raise MediaError(f"{what} is empty", reason="empty")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def parse(url: str) -> URL:
    """A URL whose path and query are as they were written, but for characters that none has.

    As `requests` asks for a colocated server. Other escapes mean the same to a server, and not
    to a signature over the text of the URL.

    Raises:
        MediaError: it is none.
    """
    try:
        known, written = URL(url), urlsplit(url)
        if not known.raw_host:
            return known
        return URL.build(
            scheme=known.scheme,
            authority=known.raw_authority,
            path=_escaped(_without_dots(written.path)) or "/",
            query_string=_escaped(written.query),
            fragment=known.raw_fragment,
            encoded=True,
        )
    except ValueError:
        raise MediaError("the media URL is malformed") from None


def _escaped(written: str) -> str:
    """Part of a URL, with escapes in capitals, and where they are needed alone."""

    def needed(escape: re.Match[str]) -> str:
        meant = chr(int(escape[0][1:], 16))
        return meant if _UNRESERVED.match(meant) else escape[0].upper()

    if _NO_ESCAPE.search(written):
        return quote(written, safe=_URL_CHARACTERS)
    return quote(_ESCAPE.sub(needed, written), safe=_URL_CHARACTERS + "%")


def _without_dots(path: str) -> str:
    """RFC 3986, 5.2.4."""
    if "/." not in path:
        return path
    kept: list[str] = []
    for segment in path.split("/")[1:]:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    ends_in_folder = path.endswith(("/.", "/.."))
    return "/".join(["", *kept, *([""] if ends_in_folder else [])])


def _canonical_host(host: str) -> str:
    return (URL.build(scheme="http", host=host.strip(".")).raw_host or host).lower()
