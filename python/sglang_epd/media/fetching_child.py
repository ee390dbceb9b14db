"""The process that reads from hosts, and the messages between it and its server.

server                          child
  | ---- Ask ----------------->   |  a fetch, by its number from now on
  | <--- Grow ------------------- |  it needs room for more bytes
  | ---- Grown --------------->   |
  | ---- GiveUp -------------->   |  the fetch is cancelled; no answer
  | <--- Fetched (file) --------- |  small media travel in the message
  | <--- NotFetched ------------- |
  | <--- Alive ------------------ |  each second, so that a child that stands still is seen
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from typing import Any

import msgspec

from sglang_epd.errors import EncodeError, EpdError, MediaError
from sglang_epd.media.fetch import MediaFetcher
from sglang_epd.media.freshness import Trail
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.slots import Account
from sglang_epd.media.source import MediaSource
from sglang_epd.processes.packets import Channel, new_file

logger = logging.getLogger(__name__)

BEAT_S = 1.0
# Of a message, which holds 64 KiB: a file costs some system calls more.
_INLINE_BYTES = 32 << 10
# Written at a time, in less than a millisecond.
_WRITE_BYTES = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Read a URL.

    Attributes:
        owner: of the account that is asked for room; None where none is.
    """

    number: int
    url: str
    owner: int | None


class Grown(msgspec.Struct, frozen=True, tag="grown"):
    """The bytes that a `Grow` named may be read."""

    number: int


class GiveUp(msgspec.Struct, frozen=True, tag="give up"):
    number: int


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Room for so many bytes, with those that the fetch has."""

    number: int
    nbytes: int


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Media, whose bytes are in the file that comes with this, or in `data`."""

    number: int
    trail: Trail
    digest: bytes
    data: bytes = b""


class NotFetched(msgspec.Struct, frozen=True, tag="failed"):
    """The fetch failed.

    Attributes:
        code, message: of the error, as `errors.from_code` takes them.
        reason: of a `MediaError`.
    """

    number: int
    code: str
    message: str
    reason: str = ""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    pass


TO_CHILD: msgspec.msgpack.Decoder[Ask | Grown | GiveUp] = msgspec.msgpack.Decoder(
    Ask | Grown | GiveUp
)
TO_SERVER: msgspec.msgpack.Decoder[Grow | Fetched | NotFetched | Alive] = msgspec.msgpack.Decoder(
    Grow | Fetched | NotFetched | Alive
)


def serve(end: socket.socket, options: dict[str, Any]) -> None:
    """Fetch what the server asks for, until it is gone.

    Args:
        options: the server's limits, `plain`, and further options of `MediaFetcher`.
    """
    # 768 fetches are some 60,000 objects: each full collection stops all of them for 0.1 s.
    gc.set_threshold(700, 10, 50)
    limits = MediaLimits.read(options.pop("limits"))
    asyncio.run(_serve(end, MediaFetcher(limits, **options)))


async def _serve(end: socket.socket, fetcher: MediaFetcher) -> None:
    async with fetcher:
        child = _Child(end, fetcher)
        while not child.channel.closed:
            child.channel.send(Alive())
            await asyncio.sleep(BEAT_S)


class _Remote(Account):
    """The account that the server has of a fetch."""

    def __init__(self, child: _Child, number: int, owner: int) -> None:
        self._child = child
        self._number = number
        self._owner = owner

    @property
    def owner(self) -> int:
        return self._owner

    async def grow(self, nbytes: int) -> None:
        await self._child.room(self._number, nbytes)


class _Child:
    def __init__(self, end: socket.socket, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher
        self.channel = Channel(end, TO_CHILD, self._received, lambda _reason: None)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._rooms: dict[int, asyncio.Future[None]] = {}

    async def room(self, number: int, nbytes: int) -> None:
        """Wait until the server has room for so many bytes of a fetch."""
        room = self._rooms[number] = asyncio.get_running_loop().create_future()
        self.channel.send(Grow(number, nbytes))
        try:
            await room
        finally:
            del self._rooms[number]

    def _received(self, message: Ask | Grown | GiveUp, _fds: list[int]) -> None:
        number = message.number
        if isinstance(message, Ask):
            task = self._tasks[number] = asyncio.create_task(self._fetch(message))
            task.add_done_callback(lambda _task: self._tasks.pop(number))
        elif isinstance(message, GiveUp) and number in self._tasks:
            self._tasks[number].cancel()
        elif number in self._rooms and not self._rooms[number].done():
            self._rooms[number].set_result(None)

    async def _fetch(self, told: Ask) -> None:
        number = told.number
        account = None if told.owner is None else _Remote(self, number, told.owner)
        try:
            media = await self._fetcher.ask(MediaSource(url=told.url), account)
            if len(media.data) <= _INLINE_BYTES:
                self.channel.send(Fetched(number, media.trail, media.digest, media.data))
            else:
                file = await _file(media.data)
                self.channel.send(Fetched(number, media.trail, media.digest), [file])
        except EpdError as error:
            reason = error.reason if isinstance(error, MediaError) else ""
            self.channel.send(NotFetched(number, error.code, error.message, reason))
        except Exception:
            logger.exception("A fetch failed")
            failed = EncodeError("the media could not be fetched")
            self.channel.send(NotFetched(number, failed.code, failed.message))


async def _file(data: bytes) -> int:
    fd = new_file(len(data))
    try:
        view = memoryview(data)
        for at in range(0, len(data), _WRITE_BYTES):
            os.pwrite(fd, view[at : at + _WRITE_BYTES], at)
            await asyncio.sleep(0)
    except BaseException:
        os.close(fd)
        raise
    return fd
