"""Host names looked up in threads that nothing else waits for."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult


class SystemResolver(AbstractResolver):
    """The system's resolver (`getaddrinfo`) on a thread pool of its own.

    A look-up cannot be called off: one at a name server that never answers holds its
    thread for half a minute, long after its fetch has given up. On the event loop's
    own pool, which has a handful of threads, a few such names would stop every other
    user of that pool.

    Args:
        threads: look-ups at a time.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The stream addresses of `host`. Raises OSError where there are none."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._pool, _look_up, host, port, family
        )
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

    async def close(self) -> None:
        """Forget the look-ups that have not begun; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list:
    try:
        return socket.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    except UnicodeError as error:  # a label that is empty or over-long
        raise OSError("not a host name") from error
