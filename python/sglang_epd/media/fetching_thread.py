"""A fetcher on an event loop of its own, so that hosts keep no other loop busy.

Hosts' bytes are parsed, decrypted and unpacked on the loop that reads from them. A server's
loop answers `/health` and other users meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Hashable
from types import TracebackType
from typing import Any, Self, TypeVar

from sglang_epd.media.fetch import (
    Answer,
    FetchedMedia,
    MediaFetcher,
    reading_until,
)
from sglang_epd.media.freshness import Trail
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.slots import Account
from sglang_epd.media.source import MediaSource

T = TypeVar("T")


class _Elsewhere(Account):
    """An account of another event loop than the one that it is asked on."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._loop = asyncio.get_running_loop()

    @property
    def owner(self) -> Hashable:
        return self._account.owner

    async def grow(self, nbytes: int) -> None:
        growing = asyncio.run_coroutine_threadsafe(self._account.grow(nbytes), self._loop)
        await asyncio.wrap_future(growing)


class FetchingThread:
    """A `MediaFetcher` in a thread; an async context manager, as that is.

    `fetch`, `ask` and `check` are the fetcher's. An account is asked on the caller's event
    loop. Cancelling a call cancels it in the thread.

    Args:
        limits: media that may be read.
        options: further ones of `MediaFetcher`.
    """

    def __init__(self, limits: MediaLimits, **options: Any) -> None:
        self._fetcher = MediaFetcher(limits, **options)

    async def __aenter__(self) -> Self:
        # asyncio's own loop: its reads go through `GuardedSocket`.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run, name="epd-fetching", daemon=True)
        self._thread.start()
        await self._there(self._fetcher.__aenter__())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._there(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)

    async def fetch(
        self, source: MediaSource, deadline: float, account: Account | None = None
    ) -> FetchedMedia:
        """As `MediaFetcher.fetch`."""
        if source.url is None:
            return await self._fetcher.fetch(source, deadline)
        async with reading_until(deadline, source):
            return await self._there(
                self._fetcher.fetch(source, deadline, account and _Elsewhere(account))
            )

    async def ask(
        self, source: MediaSource, known: Trail | None = None, account: Account | None = None
    ) -> Answer:
        """As `MediaFetcher.ask`."""
        return await self._there(self._fetcher.ask(source, known, account and _Elsewhere(account)))

    def check(self, trail: Trail, nbytes: int) -> None:
        """As `MediaFetcher.check`."""
        self._fetcher.check(trail, nbytes)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        # No name here for the future: its error would keep this frame, and the frame the error.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._fetcher.__aexit__(None, None, None)
        await self._loop.shutdown_default_executor()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


Fetcher = MediaFetcher | FetchingThread
