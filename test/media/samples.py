"""What several of these tests need that is not a fixture."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import BytesIO

import numpy as np
from aiohttp import web
from PIL import Image

from sglang_epd.media import MediaLimits
from sglang_epd.media.decode import open_image, read_image

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Starts a server on 127.0.0.1 that answers any path by one handler; gives its URL.
Serve = Callable[[Handler], Awaitable[str]]

LOOPBACK = ("127.0.0.0/8",)


def local_limits(**changes: object) -> MediaLimits:
    return MediaLimits(allowed_networks=LOOPBACK, **changes)  # type: ignore[arg-type]


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


def decode_image(data: bytes, limits: MediaLimits, *, smart_rgb: bool = False) -> Image.Image:
    return read_image(*open_image(BytesIO(data), limits), limits, smart_rgb=smart_rgb)


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    """A picture that is the same each time and no two of whose rows are equal."""
    rng = np.random.default_rng(width * 1000 + height)
    array = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(array, "RGBA").convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@asynccontextmanager
async def raw_server(answer: bytes | Callable, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A server that sends these very bytes, well-formed or not."""

    handlers: list[asyncio.Task | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        try:
            await reader.readuntil(b"\r\n\r\n")
            if callable(answer):
                await answer(writer)
            else:
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, EOFError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, host, 0)
    async with server:  # from Python 3.12 on, it is left when no connection is
        try:
            yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            for handler in filter(None, handlers):
                handler.cancel()
                await handler


async def drip(writer: asyncio.StreamWriter) -> None:
    """An answer that never ends, some fifty bytes a second."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)
