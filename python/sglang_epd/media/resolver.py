"""Host names looked up in threads that nothing else waits for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from sglang_epd.media.slots import Shares

# Each has a file descriptor or two.
_THREADS = 512
_WAIT_S = 2.0
_KNOWN_NAMES = 4096
# Under these some countries have names registered.
_SECOND_LEVEL = frozenset(
    ["ac", "co", "com", "edu", "go", "gob", "gouv", "gov", "ne", "net", "nom", "or", "org"]
)
# What a name server has said, as against none that answers.
_NO_SUCH_NAME = {socket.EAI_NONAME, socket.EAI_NODATA}


class SystemResolver(AbstractResolver):
    """The system's resolver (`getaddrinfo`), each look-up in a thread that nothing waits for.

    A look-up cannot be called off: one at a name server that never answers holds its thread
    for up to half a minute, long after its fetch has given up. Domains (the last two labels of
    names, three of `example.co.uk`) share the threads, and a name has one look-up at a time. A
    name that was found before keeps its addresses while all threads are taken, or name servers
    fail or take more than two seconds; another cannot be resolved if it finds no thread in as long.

    Args:
        threads: look-ups at a time.
        look_up: `getaddrinfo`, by host, port and family.
    """

    def __init__(
        self,
        threads: int = _THREADS,
        look_up: Callable[[str, int, int], list[Any]] | None = None,
    ) -> None:
        self._threads = Shares(threads)
        self._look_up = look_up or _look_up
        self._known: dict[tuple[str, int, int], list[Any]] = {}
        self._under_way: dict[tuple[str, int, int], asyncio.Task[list[Any]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The stream addresses of `host`; they may be those that were found before.

        Raises:
            OSError: it has none.
        """
        known = found = self._known.get((host, port, family))
        if known is None or self._threads.free:
            try:
                async with asyncio.timeout(_WAIT_S if known else None):
                    found = await self.ask(host, port, family)
            except OSError as error:  # TimeoutError is one
                if known is None or getattr(error, "errno", None) in _NO_SUCH_NAME:
                    raise
        return [
            ResolveResult(
                hostname=host,
                host=str(location[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, location in found or ()
        ]

    async def close(self) -> None:
        """Nothing to be done: look-ups under way end by themselves."""

    async def ask(
        self, host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[Any]:
        """What name servers say now, as `getaddrinfo` returns it.

        Raises:
            OSError: nothing.
        """
        name = host, port, family
        look = self._under_way.get(name)
        if look is None:
            look = self._under_way[name] = asyncio.create_task(self._find(*name))

            def end(ended: asyncio.Task[list[Any]]) -> None:
                del self._under_way[name]
                if not ended.cancelled():
                    # asyncio logs an error that no caller has read, and all may have left.
                    ended.exception()

            look.add_done_callback(end)
        return await asyncio.shield(look)

    async def _find(self, host: str, port: int, family: int) -> list[Any]:
        try:
            async with asyncio.timeout(_WAIT_S) as patience, self._threads.of(_domain(host)):
                patience.reschedule(None)
                found = await self._in_a_thread(host, port, family)
        except TimeoutError:
            raise OSError("too many look-ups are under way") from None
        self._known.pop((host, port, family), None)
        self._known[host, port, family] = found
        if len(self._known) > _KNOWN_NAMES:
            del self._known[next(iter(self._known))]
        return found

    async def _in_a_thread(self, *name: Any) -> list[Any]:
        """A daemon: those of a pool keep a process from ending."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        def say(found: list[Any] | None, error: Exception | None) -> None:
            if not answer.done():
                answer.set_exception(error) if error else answer.set_result(found or [])

        def run() -> None:
            found = error = None
            try:
                found = self._look_up(*name)
            except Exception as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(say, found, error)

        threading.Thread(target=run, name="media-dns", daemon=True).start()
        return await answer


def _domain(host: str) -> str:
    """What one owner has, as a rule."""
    labels = host.rstrip(".").lower().split(".")
    of_country = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in _SECOND_LEVEL
    return ".".join(labels[-3 if of_country else -2 :])


def _look_up(host: str, port: int, family: int) -> list[Any]:
    try:
        return socket.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
    except UnicodeError as error:  # a label that is empty or over-long
        raise OSError("not a host name") from error
