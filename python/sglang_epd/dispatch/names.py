"""Encoder URLs whose host name stands for several encoders.

A headless service's name resolves to the addresses of all its pods, and a connection to it
goes to any of them. So that each can be judged and loaded by itself, such a URL becomes
one URL an address. Not where the scheme is https: the certificate is for the name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Iterable

from yarl import URL

from sglang_epd.dispatch.pool import STATIC, Pool

logger = logging.getLogger(__name__)

# A host's addresses. Raises OSError where it has none or no resolver answers.
Resolve = Callable[[str, int], Awaitable[list[str]]]
_TIMEOUT_S = 3.0
_MAX_ADDRESSES = 1024


class Names:
    """Keeps the addresses of URLs in the pool.

    A URL stays as it was typed while its name has one address. Once it had several its
    encoders go by their addresses for good, because changing an encoder's URL would cancel its
    requests in flight. A resolver that fails changes nothing.

    Args:
        urls: as typed; each with no slash at its end.
    """

    def __init__(self, pool: Pool, urls: Iterable[str], resolve: Resolve) -> None:
        self._pool = pool
        self._resolve = resolve
        self._known: dict[str, set[str]] = {}
        self._failing: set[str] = set()
        for url in dict.fromkeys(url.rstrip("/") for url in urls):
            if _is_name(URL(url)):
                self._known[url] = set()
            else:
                pool.add(url, STATIC)

    async def refresh(self) -> None:
        """Ask for all names once; returns when all have been answered or given up."""
        await asyncio.gather(*(self._refresh(url) for url in self._known))

    async def _refresh(self, typed: str) -> None:
        url, owner, known = URL(typed), f"dns:{typed}", self._known[typed]
        host, port = url.host, url.port
        assert host is not None
        assert port is not None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                addresses = _one_family(await self._resolve(host, port))
            if not addresses:
                raise OSError("it has no address")
        except (OSError, TimeoutError) as error:
            if typed not in self._failing:
                self._failing.add(typed)
                what = "no answer" if isinstance(error, TimeoutError) else error
                logger.warning("Cannot look up %s (%s): keeping what is known", host, what)
            found = known or {typed}
        else:
            self._failing.discard(typed)
            if len(addresses) == 1 and known <= {typed}:
                found = {typed}
            else:
                found = {str(url.with_host(one)).rstrip("/") for one in addresses[:_MAX_ADDRESSES]}
        # Joins first: items of leaving encoders then have somewhere to go.
        for new in sorted(found - known):
            self._pool.add(new, owner)
        for old in sorted(known - found):
            self._pool.remove(old, owner)
        if found not in (known, {typed}):
            logger.info("%s stands for %d encoders", typed, len(found))
        self._known[typed] = found


def _is_name(url: URL) -> bool:
    if url.scheme not in ("http", "grpc") or not url.host:
        return False
    try:
        ipaddress.ip_address(url.host)
    except ValueError:
        return True
    return False


def _one_family(addresses: Iterable[str]) -> list[str]:
    """Of hosts with addresses of both families, one family: they are the same hosts."""
    found = {ipaddress.ip_address(one.partition("%")[0]) for one in addresses}
    version = min((one.version for one in found), default=4)
    return [str(one) for one in sorted(found, key=int) if one.version == version]
