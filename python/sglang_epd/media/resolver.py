"""Host names looked up in threads that nothing else waits for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from sglang_epd.media.shares import Shares

_THREADS = 1024
_PER_DOMAIN = 32
_WAIT_S = 2.0


class SystemResolver(AbstractResolver):
    """The system's resolver (`getaddrinfo`) on a thread pool of its own.

    A look-up cannot be called off: one at a name server that never answers holds its
    thread for up to half a minute, long after its fetch has given up. On the event loop's
    own pool, which has a handful of threads, a few such names would stop every other
    user of that pool. Names of one domain (the last two labels) have a share of the threads,
    and a name that found no thread in two seconds cannot be resolved now.

    Args:
        threads: look-ups at a time.
        per_domain: of these, of one domain's names.
        look_up: `getaddrinfo`, by host, port and family.
    """

    def __init__(
        self,
        threads: int = _THREADS,
        per_domain: int = _PER_DOMAIN,
        look_up: Callable[[str, int, int], list[Any]] | None = None,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media-dns")
        self._free = asyncio.Semaphore(threads)
        self._domains = Shares(per_domain)
        self._look_up = look_up or _look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The stream addresses of `host`. Raises OSError where there are none."""
        domain = ".".join(host.rstrip(".").lower().split(".")[-2:])
        try:
            async with asyncio.timeout(_WAIT_S) as patience, self._domains.of(domain), self._free:
                patience.reschedule(None)
                found = await self._found(host, port, family)
        except TimeoutError:
            raise OSError("too many look-ups are under way") from None
        return [
            ResolveResult(
                hostname=host,
                host=str(location[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, location in found
        ]

    async def _found(self, host: str, port: int, family: int) -> list[Any]:
        """What the look-up found; returns, also when it is cancelled, when its thread is free."""
        loop = asyncio.get_running_loop()
        looking = loop.run_in_executor(self._pool, self._look_up, host, port, family)
        while not looking.done():
            await asyncio.shield(asyncio.wait([looking]))
        return looking.result()

    async def close(self) -> None:
        """Forget the look-ups that have not begun; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: int) -> list[Any]:
    try:
        return socket.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    except UnicodeError as error:  # a label that is empty or over-long
        raise OSError("not a host name") from error
