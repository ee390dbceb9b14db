"""A fetcher on an event loop of its own, so that hosts keep no other loop busy.

What hosts send is parsed, decrypted and unpacked on the loop that reads from them. A server's
loop answers `/health` and other users meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from sglang_epd.media.fetch import (
    Answer,
    FetchedMedia,
    MediaFetcher,
    any_room,
    reading_until,
)
from sglang_epd.media.freshness import Trail
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.slots import RoomFor
from sglang_epd.media.source import MediaSource

T = TypeVar("T")


class FetchingThread:
    """A `MediaFetcher` in a thread; an async context manager, as that is.

    `fetch`, `ask` and `check` are the fetcher's. `room_for` is called on the caller's event
    loop. Cancelling a call cancels it in the thread.

    Args:
        limits: what may be read.
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
        self, source: MediaSource, deadline: float, room_for: RoomFor = any_room
    ) -> FetchedMedia:
        """As `MediaFetcher.fetch`."""
        if source.url is None:
            return await self._fetcher.fetch(source, deadline)
        async with reading_until(deadline, source):
            return await self._call(
                lambda room: self._fetcher.fetch(source, deadline, room), room_for
            )

    async def ask(
        self, source: MediaSource, known: Trail | None = None, room_for: RoomFor = any_room
    ) -> Answer:
        """As `MediaFetcher.ask`."""
        return await self._call(lambda room: self._fetcher.ask(source, known, room), room_for)

    def check(self, trail: Trail, nbytes: int) -> None:
        """As `MediaFetcher.check`."""
        self._fetcher.check(trail, nbytes)

    async def _call(
        self, call: Callable[[RoomFor], Coroutine[Any, Any, T]], room_for: RoomFor
    ) -> T:
        here = asyncio.get_running_loop()

        async def room(nbytes: int) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(room_for(nbytes), here))

        return await self._there(call(room if room_for is not any_room else any_room))

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
