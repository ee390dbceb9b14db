"""A fetcher in a process of its own, so that hosts keep no interpreter busy but that one.

Hosts' bytes are parsed, decrypted, unpacked and hashed there. A server's process answers
`/health` and other users meanwhile, and receives whole media.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from contextlib import suppress
from typing import Any, BinaryIO, Self

from sglang_epd.errors import EpdError, MediaError, UnavailableError, from_code
from sglang_epd.media.fetcher import FetchedMedia, Fetcher
from sglang_epd.media.fetching_child import (
    BEAT_S,
    TO_SERVER,
    Alive,
    Ask,
    Fetched,
    GiveUp,
    Grow,
    Grown,
    NotFetched,
)
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.slots import Account
from sglang_epd.media.source import MediaSource
from sglang_epd.processes.nursery import Child, Nursery
from sglang_epd.processes.packets import Channel, close_all

logger = logging.getLogger(__name__)

_MODULE = "sglang_epd.media.fetching_child"
# A process that says nothing for so many beats stands still.
_MISSED_BEATS = 10
# Read on the event loop, in less than a millisecond.
_SMALL_FILE_BYTES = 1 << 20


class FetchingProcess(Fetcher):
    """A `MediaFetcher` in a process of its own, which is replaced if it ends or stands still.

    An account is asked on the caller's event loop. A fetch whose process was lost is tried once
    more. Cancelling a call cancels it there.

    Args:
        limits: media that may be read.
        options: further ones of `MediaFetcher`.
    """

    def __init__(self, limits: MediaLimits, **options: Any) -> None:
        super().__init__(limits)
        self._options = {"limits": limits.plain(), **options}

    async def __aenter__(self) -> Self:
        self._nursery = Nursery([_MODULE])
        self._starting = self._start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._starting.done() and not self._starting.exception():
            self._starting.result().close()
        await asyncio.to_thread(self._nursery.close)
        with suppress(UnavailableError):
            (await self._starting).close()

    async def ask(self, source: MediaSource, account: Account | None = None) -> FetchedMedia:
        """As `Fetcher.ask`."""
        for _ in range(2):
            process = await self._process()
            with suppress(_LostError):
                return await process.ask(source, account)
        raise UnavailableError("the process that fetches media has ended")

    async def _process(self) -> _Process:
        starting = self._starting
        if starting.done() and (starting.exception() or starting.result().lost):
            starting = self._starting = self._start()
        return await asyncio.shield(starting)

    def _start(self) -> asyncio.Task[_Process]:
        """Does not wait: its modules take a second, and other things of a server take longer."""
        starting = asyncio.create_task(self._begin())
        starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return starting

    async def _begin(self) -> _Process:
        # At the servers' own priority: at a lower one, honest hosts are read from later as well.
        child = await asyncio.to_thread(
            self._nursery.child, f"{_MODULE}:serve", self._options, nice=0
        )
        return _Process(child)


class _LostError(Exception):
    """The process ended before it had answered."""


class _Fetch:
    """One that is asked for.

    Attributes:
        answer: the child's last message about it.
        file: that came with it.
        growing: waits for the account.
    """

    def __init__(self, account: Account | None) -> None:
        self.account = account or Account()
        self.answer: asyncio.Future[Fetched | NotFetched] = (
            asyncio.get_running_loop().create_future()
        )
        self.file: BinaryIO | None = None
        self.growing: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self.growing is not None:
            self.growing.cancel()
        if self.file is not None:
            self.file.close()

    async def data(self, told: Fetched) -> bytes:
        if self.file is None:
            return told.data
        # The reader's own: a call that is cancelled must not close it under a thread.
        file, self.file = self.file, None
        if os.fstat(file.fileno()).st_size <= _SMALL_FILE_BYTES:
            return _whole(file)
        # Shielded: a call that is cancelled before the thread begins would leave the file open.
        return await asyncio.shield(asyncio.to_thread(_whole, file))


class _Process:
    """The process, from its birth until it is lost.

    Attributes:
        lost: it has ended, or was ended because it stood still or said what is no message.
    """

    def __init__(self, child: Child) -> None:
        self.lost = False
        self._child = child
        self._channel = Channel(child.end, TO_SERVER, self._received, self._lose)
        self._numbers = itertools.count()
        self._fetches: dict[int, _Fetch] = {}
        self._missed = 0
        self._watching = asyncio.create_task(self._watch())

    async def ask(self, source: MediaSource, account: Account | None) -> FetchedMedia:
        if self.lost:
            raise _LostError
        number = next(self._numbers)
        fetch = self._fetches[number] = _Fetch(account)
        owner = None if account is None else account.owner
        self._channel.send(Ask(number, source.url or "", owner))
        try:
            told = await fetch.answer
            if isinstance(told, NotFetched):
                raise _error(told)
            return FetchedMedia(await fetch.data(told), told.digest, told.trail)
        finally:
            del self._fetches[number]
            if fetch.answer.cancelled():
                self._channel.send(GiveUp(number))
            fetch.close()

    def close(self) -> None:
        """End it; doing so again does nothing."""
        if self.lost:
            return
        self.lost = True
        self._watching.cancel()
        self._channel.close()
        self._child.close()
        for fetch in self._fetches.values():
            if not fetch.answer.done():
                fetch.answer.set_exception(_LostError())

    def _lose(self, reason: str) -> None:
        logger.error(
            "The process that fetches media (pid %d) is replaced: %s", self._child.pid, reason
        )
        self.close()

    def _received(self, message: Grow | Fetched | NotFetched | Alive, fds: list[int]) -> None:
        self._missed = 0
        if (
            isinstance(message, Alive)
            or (fetch := self._fetches.get(message.number)) is None
            or fetch.answer.done()
        ):
            close_all(fds)
        elif isinstance(message, Grow):
            fetch.growing = asyncio.create_task(self._grow(fetch, message))
        else:
            if fds:
                fetch.file = os.fdopen(fds.pop(), "rb", buffering=0)
            fetch.answer.set_result(message)

    async def _grow(self, fetch: _Fetch, told: Grow) -> None:
        try:
            await fetch.account.grow(told.nbytes)
        except EpdError as error:
            if not fetch.answer.done():
                fetch.answer.set_exception(error)
                self._channel.send(GiveUp(told.number))
            return
        self._channel.send(Grown(told.number))

    async def _watch(self) -> None:
        while self._missed < _MISSED_BEATS:
            await asyncio.sleep(BEAT_S)
            self._missed += 1
        self._lose(f"it has said nothing for {_MISSED_BEATS * BEAT_S:g} s")


def _whole(file: BinaryIO) -> bytes:
    with file:
        file.seek(0)
        return file.read()


def _error(told: NotFetched) -> EpdError:
    error = from_code(told.code, told.message)
    if isinstance(error, MediaError):
        error.reason = told.reason
    return error
