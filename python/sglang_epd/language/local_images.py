"""Images that this server encodes itself, read as an encoder reads them.

Left to SGLang, a picture would be fetched from anywhere and decoded without bounds. Here
it is fetched and decoded by the rules that hold on encoders, and gets the same identity:
both ways have the same access rules, prefix cache entries and error messages.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from sglang_epd.decoding import Decoders
from sglang_epd.errors import EpdError, MediaTypeError
from sglang_epd.media import (
    Arrival,
    FetchBounds,
    FetchingProcess,
    Intake,
    MediaLimits,
    MediaSource,
    check_content_hash,
)
from sglang_epd.modality import IMAGE
from sglang_epd.namespace import embedding_key
from sglang_epd.wire.http import EncodeItem

# Decoded at a time; each that waits for memory takes a thread as well.
_PLACES = 4
_THREADS = 16


@dataclass(frozen=True)
class LocalImage:
    """A picture, and the key that an encoder would give it."""

    image: Image.Image
    key: bytes


class LocalImages:
    """Reads images. Use it from one event loop; its connections last as long as the process.

    Args:
        namespace: this server's encoder identity.
        limits: media that may be read.
        fetched_bytes: for encoded media at a time, from their fetch until they are decoded.
        decode_bytes: for all that is decoded at a time.
    """

    def __init__(
        self, namespace: str, limits: MediaLimits, *, fetched_bytes: int, decode_bytes: int
    ) -> None:
        self._namespace = namespace
        self._fetcher = FetchingProcess(limits)
        self._opening = asyncio.Lock()
        self._open = False
        self._intake = Intake(FetchBounds(fetched_bytes))
        self._requests = itertools.count()
        self._decoders = Decoders(limits, decode_bytes, _PLACES)
        self._threads = ThreadPoolExecutor(_THREADS, "epd-decode")

    async def read(self, items: Sequence[EncodeItem], deadline: float) -> list[LocalImage]:
        """All of a prompt's images.

        Args:
            deadline: on the clock of `time.monotonic`.

        Raises:
            EpdError: of the first that cannot be read; the message names it.
        """
        async with self._opening:
            if not self._open:
                await self._fetcher.__aenter__()
                self._open = True
        request = next(self._requests)
        tasks = [asyncio.create_task(self._read(request, item, deadline)) for item in items]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _end(tasks)

    async def close(self) -> None:
        """Close the connections, and end the decoders."""
        self._decoders.close()
        if self._open:
            self._open = False
            await self._fetcher.__aexit__(None, None, None)

    async def _read(self, request: int, item: EncodeItem, deadline: float) -> LocalImage:
        try:
            with self._intake.arrival((request, item.item)) as arrival:
                return await self._fetch_and_decode(item, deadline, arrival)
        except EpdError as error:
            raise type(error)(f"{item.label}: {error.message}") from None

    async def _fetch_and_decode(
        self, item: EncodeItem, deadline: float, arrival: Arrival
    ) -> LocalImage:
        if item.modality != IMAGE:
            raise MediaTypeError("only encoders take it")
        source = MediaSource(data=item.data, url=item.url)
        media = await self._fetcher.fetch(source, deadline, arrival)
        if item.url is not None:
            arrival.settle(len(media.data))
        await asyncio.to_thread(check_content_hash, media.data, item.content_hash)
        key = embedding_key(self._namespace, media.digest, item.modality, item.options)
        return LocalImage(await self._decode(media.data, deadline), key)

    async def _decode(self, data: bytes, deadline: float) -> Image.Image:
        decoding = self._decoders.begin(deadline)

        def decode() -> Image.Image:
            with decoding:
                return decoding.image(data)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode)
        except asyncio.CancelledError:
            decoding.stop()
            raise


async def _end(tasks: list[asyncio.Task[LocalImage]]) -> None:
    """Cancel what is left, and forget all: a caller's frame, which an error's trace holds, would
    hold the error by its task, and the other images."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
