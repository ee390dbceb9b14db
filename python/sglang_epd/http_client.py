"""HTTP among this package's servers: sessions, and bodies of a bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp


def session(headers: Mapping[str, str] | None = None, **connector: Any) -> aiohttp.ClientSession:
    """A session without cookies, proxies and a bound on connections; the caller closes it.

    Args:
        headers: of every request.
        connector: options of `aiohttp.TCPConnector`.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connector),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        headers=headers,
    )


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, or its beginning: more than `max_bytes` where it is longer than that."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)
