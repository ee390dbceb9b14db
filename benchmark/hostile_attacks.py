"""One attacker, for `hostile.py` or by hand: at most so many requests and bytes a second, for so
many seconds, on loopback.

    .venv/bin/python benchmark/hostile_attacks.py tiff --seconds 20 --language http://127.0.0.1:30100
    .venv/bin/python benchmark/hostile_attacks.py offers --seconds 20 --payload 127.0.0.1:41000

Prints "attacking" when it begins, and as JSON what it did. Users' attacks go to the language
server's chat API, strangers' straight to a port. See `hostile_media.py` for the media.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import random
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import aiohttp
import hostile_media as media
from hostile_media import data_url, fresh

from sglang_epd.wire.messages import Layout, Offer, TensorSpec, encode_message

BYTES_PER_S = 10e6
REQUESTS_PER_S = 20.0
# Requests of one attacker that wait for their answers.
OUTSTANDING = 256
CONNECTIONS = 20
# Not the honest media's host: connections are bounded by host too.
HOSTS = [f"127.0.0.{number}" for number in range(2, 66)]
URLS_IN_A_REQUEST = 32
LARGE_BYTES = 30 << 20
LARGE_URLS = 100
INLINE_BYTES = 32 << 20
MANY_ITEMS = 4096
_CHUNKS = b"1\r\nx\r\n" * 11_000

Parts = list[tuple[str, str]]  # the kind of a medium, and its URL
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Pace:
    """Lets so many bytes and turns a second pass."""

    def __init__(self, turns_per_s: float = REQUESTS_PER_S) -> None:
        self._turn_s = 1 / turns_per_s
        self._free = time.monotonic()

    async def take(self, count: int) -> None:
        """Wait for a turn of so many bytes."""
        self._free = max(self._free, time.monotonic())
        due, self._free = self._free, self._free + max(self._turn_s, count / BYTES_PER_S)
        await asyncio.sleep(due - time.monotonic())


class Attacker:
    """What the attacks share: where they go, and what came of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.language: str = options.language
        self.encoder: str = options.encoder
        self.payload: str = options.payload
        self.answers: Counter[str] = Counter()
        self.sent_bytes = 0

    # Users

    async def chat(self, draw: Callable[[], Parts], per_s: float = REQUESTS_PER_S) -> None:
        """Ask about these media for ever, and read the answers."""
        pace, waiting = Pace(per_s), asyncio.Semaphore(OUTSTANDING)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as tasks:

            async def ask(body: bytes) -> None:
                try:
                    async with http.post(
                        f"{self.language}/v1/chat/completions",
                        data=io.BytesIO(body),
                        headers={"Content-Type": "application/json"},
                    ) as response:
                        await response.read()
                        self.answers[str(response.status)] += 1
                except aiohttp.ClientError as error:
                    self.answers[type(error).__name__] += 1
                finally:
                    waiting.release()

            while True:
                await waiting.acquire()
                body = chat_body(draw())
                await pace.take(len(body))
                self.sent_bytes += len(body)
                tasks.create_task(ask(body))

    async def inline(self, draw: Callable[[], list[bytes]], kind: str = "image") -> None:
        kinds = {"image": "image/png", "video": "video/mp4"}
        await self.chat(
            lambda: [(kind, data_url(fresh(one), kinds[kind])) for one in draw()],
        )

    async def leave(self, pictures: list[bytes]) -> None:
        """Twelve clients send four large pictures each, and leave without an answer."""
        address = urlsplit(self.language).netloc
        pace = Pace()

        async def client() -> None:
            while True:
                four = random.sample(pictures, 4)
                body = chat_body([("image", data_url(fresh(one), "image/jpeg")) for one in four])
                await pace.take(len(body))
                head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                async with connection(address) as (_, writer):
                    writer.write(head.encode() + body)
                    await writer.drain()
                    self.sent_bytes += len(body)
                    self.answers["left"] += 1

        await asyncio.gather(*(client() for _ in range(12)))

    async def urls(self, answer: Connected, count: int, per_s: float = REQUESTS_PER_S) -> None:
        """Ask about so many URLs a request, which answer like this."""
        async with serving(answer) as bases:
            numbers, hosts = itertools.count(), itertools.cycle(bases)
            await self.chat(
                lambda: [("image", f"{next(hosts)}/{next(numbers)}") for _ in range(count)], per_s
            )

    # Strangers

    async def payload_frames(self, draw: Callable[[], bytes], *, ending: bool) -> None:
        """Frames to the payload port over many connections; messages of one, or without end."""
        pace = Pace(1e6)

        async def client() -> None:
            while True:
                with suppress(OSError, asyncio.IncompleteReadError):
                    async with connection(self.payload) as (reader, writer):
                        writer.write(_GREETING + _READY)
                        await reader.readexactly(len(_GREETING))
                        while True:
                            body = draw()
                            await pace.take(len(body))
                            flags = b"\x02" if ending else b"\x03"
                            writer.write(flags + struct.pack(">Q", len(body)) + body)
                            await writer.drain()
                            self.sent_bytes += len(body)
                            self.answers["frames"] += 1
                self.answers["connections ended by the server"] += 1
                await asyncio.sleep(0.2)

        await asyncio.gather(*(client() for _ in range(CONNECTIONS)))

    async def encoder_port(self) -> None:
        """Half headers, bodies that do not come, and bytes from nowhere, held open."""
        head = "POST /v1/encode HTTP/1.1\r\nHost: x\r\n"
        openings = [
            f"{head}X-Slow: ".encode(),
            f"{head}Content-Length: 1000000\r\n\r\n".encode(),
            f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + _CHUNKS,
            f"{head}Content-Length: 100000\r\n\r\n".encode() + secrets.token_bytes(100_000),
            secrets.token_bytes(1000),
        ]
        address = urlsplit(self.encoder).netloc
        pace = Pace()

        async def hold(opening: bytes) -> None:
            with suppress(OSError):
                async with connection(address) as (reader, writer):
                    writer.write(opening)
                    self.sent_bytes += len(opening)
                    status = (await reader.readline())[9:12].decode(errors="replace")
                    self.answers[status or "ended"] += 1
                    await reader.read()

        async with asyncio.TaskGroup() as tasks:
            for opening in itertools.cycle(openings):
                await pace.take(len(opening))
                self.answers["connections"] += 1
                tasks.create_task(hold(opening))


@asynccontextmanager
async def connection(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def chat_body(parts: Parts) -> bytes:
    content = [{"type": f"{kind}_url", f"{kind}_url": {"url": url}} for kind, url in parts]
    message = {"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}
    return json.dumps({"model": "default", "messages": [message], "max_tokens": 1}).encode()


# A media server that means no good


@asynccontextmanager
async def serving(answer: Connected) -> AsyncIterator[list[str]]:
    """Answers any request so, on each of HOSTS; gives the URLs."""

    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await reader.readuntil(b"\r\n\r\n")
                await answer(reader, writer)
        finally:
            writer.close()
            tasks.discard(task)

    servers = [await asyncio.start_server(connected, host, 0) for host in HOSTS]
    try:
        yield ["http://{}:{}".format(*server.sockets[0].getsockname()) for server in servers]
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0.1)  # connections that were accepted just now have no task yet
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.1)  # their sockets are closed by the event loop


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


def _tiny_chunks() -> Connected:
    pace = Pace(1e6)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            await pace.take(len(_CHUNKS))
            writer.write(_CHUNKS)
            await writer.drain()

    return answer


async def _drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_HEAD + b"Content-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.2)


def _large() -> Connected:
    body = secrets.token_bytes(LARGE_BYTES)

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 1 << 20):
            writer.write(body[start : start + (1 << 20)])
            await writer.drain()

    return answer


# ZMTP 3.0, as far as a DEALER without security says it
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_TYPE = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_READY = b"\x04" + bytes([6 + len(_TYPE)]) + b"\x05READY" + _TYPE


def _offer() -> Callable[[], bytes]:
    """Offers of a ticket that is none, with all the empty lists that fit."""
    layout = Layout("IMAGE", TensorSpec("float32", (1, 1)), [[]] * 261_000)

    def draw() -> bytes:
        return encode_message(Offer(secrets.token_hex(16), 0, secrets.token_bytes(32), layout, 4))

    return draw


def _each(*makers: Callable[[], bytes]) -> Callable[[], list[bytes]]:
    """Media that are made once, all of them in each request."""
    made = [make() for make in makers]
    return lambda: made


def _garbage() -> list[bytes]:
    return [random.choice(_NONSENSE)]


_NONSENSE: Sequence[bytes] = media.garbage()
# Each makes what it sends when it is called, and attacks when it is awaited, without end.
USERS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "chunks": lambda a: a.urls(_tiny_chunks(), URLS_IN_A_REQUEST),
    "drips": lambda a: a.urls(_drip, 1),
    "large-urls": lambda a: a.urls(_large(), LARGE_URLS, 1.0),
    "escapes": lambda a: a.chat(lambda: [("image", media.escapes())] * 24),
    "large-inline": lambda a: a.inline(_each(lambda: secrets.token_bytes(INLINE_BYTES))),
    "tiff": lambda a: a.inline(_each(media.tiff)),
    "jpeg2000": lambda a: a.inline(_each(media.jpeg2000)),
    "webp": lambda a: a.inline(_each(media.webp, media.webp_still)),
    "png-texts": lambda a: a.inline(_each(media.png_texts)),
    "video-claims": lambda a: a.inline(_each(media.video), "video"),
    "video-packets": lambda a: a.inline(_each(media.video_of_many_packets), "video"),
    "many-items": lambda a: a.inline(lambda: [b"not a picture"] * MANY_ITEMS),
    "garbage": lambda a: a.inline(_garbage),
    "leaving": lambda a: a.leave(media.pictures(8)),
}
STRANGERS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "offers": lambda a: a.payload_frames(_offer(), ending=True),
    "frames": lambda a: a.payload_frames(lambda: bytes(1 << 20), ending=False),
    "encoder-port": lambda a: a.encoder_port(),
}
ATTACKS = {**USERS, **STRANGERS}


async def attack(work: Awaitable[None], seconds: float) -> None:
    """For so long; what has no answer by then is given up."""
    print("attacking", flush=True)
    try:
        async with asyncio.timeout(seconds) as limit:
            await work
    except TimeoutError:
        if not limit.expired():
            raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--language", default="", metavar="URL")
    parser.add_argument("--encoder", default="", metavar="URL")
    parser.add_argument("--payload", default="", metavar="HOST:PORT")
    options = parser.parse_args()
    attacker = Attacker(options)
    asyncio.run(attack(ATTACKS[options.attack](attacker), options.seconds))
    print(json.dumps({"answers": attacker.answers, "sent_bytes": attacker.sent_bytes}))


if __name__ == "__main__":
    main()
