"""Fetching media over HTTP from untrusted addresses.

The bounds and refusals, and their places: the URL and its host on every hop (`_follow`),
the address at the moment a socket is made for it (`_guarded_socket`), the bytes while
they arrive (`_read_body`) and are unpacked (`_unpack`), the time round all of it
(`slots`, `fetch`). Decoding the media is not done here, nor is anything remembered.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import socket
import time
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from sglang_epd.errors import EpdError, MediaError, MediaForbiddenError, UnavailableError
from sglang_epd.media.fetcher import (
    FetchedMedia,
    Fetcher,
    check_not_empty,
    hashed,
    parse,
    too_large,
)
from sglang_epd.media.freshness import STATUS, Step, Trail
from sglang_epd.media.guarded_socket import GuardedSocket
from sglang_epd.media.limits import MediaLimits
from sglang_epd.media.local import open_local, read_local
from sglang_epd.media.resolver import SystemResolver
from sglang_epd.media.slots import Account, Slots, Turn
from sglang_epd.media.source import MediaSource, display

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_UNREADABLE_ENCODINGS = frozenset({"br", "zstd", "compress", "x-compress"})
_ZLIB_ENCODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_GZIP = b"\x1f\x8b"
# Asked for before anything is read, and the least that is asked for then.
_FIRST_BYTES = 64 << 10
# A packed body is unpacked in steps of so much, from pieces of so much: zlib copies what is left
# of a piece at each step.
_STEP_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
# Of one field of an answer, and of a line of it. A socket reads 64 KiB of them (`GuardedSocket`).
_FIELD_BYTES = 32 << 10
# Chunks that aiohttp parses in one go: a sixteenth of this (`StreamReader`).
_BUFFER_BYTES = 64 << 10
# A chunked body has at most so many chunks, and one more for each so many bytes. Each costs the
# event loop two microseconds; servers flush a kilobyte and more at a time.
_FEW_CHUNKS = 64
_CHUNK_BYTES = 256
# A body is large from here on. So many large bodies go on in one turn of the event loop, by 64 KiB
# each (0.1 ms); a small one waits for several turns. With no bound, 300 large bodies from fast
# hosts made a turn of 15 ms, and a small body came after 93 ms instead of 6.
_LARGE_BYTES = 1 << 20
_LARGE_READS = 2
_FILE_THREADS = 8
# Of requests whose connections are not kept for others.
_CLOSE = {"Connection": "close"}
# Of a connection that did not come about, for want of descriptors or memory.
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_HEADERS = {
    "Accept": "*/*",
    # Media is compressed already; packed transfer only serves decompression bombs.
    "Accept-Encoding": "identity",
    "User-Agent": "sglang-epd",
}


class MediaFetcher(Fetcher):
    """Reads media from URLs and allowed local files, on the running event loop.

    The connections, reused between fetches, are closed when the context is left. No proxy of
    the environment is used, no cookie kept.

    Args:
        limits: media that may be read.
        concurrency: fetches at a time; further ones wait inside their deadline.
        per_host: of these, fetches from one host, so that a slow one delays its own.
            Of both, one request has half at most (`shares`).
        resolver: looks host names up, instead of the system's resolver; closed with
            the fetcher.
    """

    def __init__(
        self,
        limits: MediaLimits,
        *,
        concurrency: int = 512,
        per_host: int = 64,
        resolver: AbstractResolver | None = None,
    ) -> None:
        super().__init__(limits)
        self._concurrency = concurrency
        self._slots = Slots(concurrency, per_host)
        # By their file descriptors, which is how a connection tells its socket.
        self._sockets: weakref.WeakValueDictionary[int, GuardedSocket] = (
            weakref.WeakValueDictionary()
        )
        self._resolver = resolver
        self._session: aiohttp.ClientSession | None = None
        # Local files alone, whose mount may hang; threads are needed for other media too.
        self._files = ThreadPoolExecutor(_FILE_THREADS, "epd-file")
        # Held for one turn of the event loop by each large body that goes on.
        self._large = asyncio.Semaphore(_LARGE_READS)

    async def __aenter__(self) -> Self:
        self._resolver = self._resolver or SystemResolver()
        connector = aiohttp.TCPConnector(
            limit=self._concurrency,
            resolver=self._resolver,
            socket_factory=self._guarded_socket,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout_s),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_BUFFER_BYTES,
            max_line_size=_FIELD_BYTES,
            max_field_size=_FIELD_BYTES,
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._slots.close()
        self._files.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._resolver is not None:
            await self._resolver.close()
            self._resolver = None

    async def ask(self, source: MediaSource, account: Account | None = None) -> FetchedMedia:
        """As `Fetcher.ask`."""
        url = source.url or ""
        trail = Trail(())
        async with self._turn(source, account) as turn:
            if url[:5].lower() == "file:":
                data = await self._read(url, turn)
            else:
                # With a slot: an item that has room for bytes can go on, and so gives them back.
                await turn.grow(_FIRST_BYTES)
                data, trail = await self._follow(parse(url), turn)
        check_not_empty(data, display(source))
        return await hashed(data, trail)

    async def _read(self, url: str, turn: Turn) -> bytes:
        """A local file, whose mount may be slow."""
        turn.rated = False
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(self._files, open_local, url, self._limits)
        try:
            await turn.grow(os.fstat(file.fileno()).st_size)
        except BaseException:
            file.close()
            raise
        return await loop.run_in_executor(self._files, read_local, file, self._limits)

    def _turn(
        self, source: MediaSource, account: Account | None
    ) -> AbstractAsyncContextManager[Turn]:
        """A slot, and the time that one item may take."""
        try:
            url = parse(source.url or "")
            host = f"{(url.raw_host or '').rstrip('.')}:{url.port}"
        except MediaError:  # its fault is reported where it is read
            host = ""
        limit_s = self._limits.total_timeout_s
        return self._slots.turn(host, display(source), limit_s, account or Account())

    async def _follow(self, url: URL, turn: Turn) -> tuple[bytes, Trail]:
        """Get `url`, following redirects by hand so that each hop is judged."""
        assert self._session is not None, "the fetcher is used outside its context"
        steps: list[Step] = []
        while len(steps) <= self._limits.max_redirects:
            url = url.with_fragment(None)
            host = self._check_url(url)
            # A URL may lead over several hosts, and idle connections over TLS take a quarter of a
            # MiB each: no more are kept than may be in use.
            headers = _CLOSE if len(self._sockets) > self._concurrency else None
            sent = time.monotonic()
            try:
                async with self._session.get(
                    url, allow_redirects=False, headers=headers
                ) as response:
                    times = {"sent": sent, "received": time.monotonic(), "wall_s": time.time()}
                    step = Step.of(str(url), response.headers, **times)
                    if response.status in _REDIRECTS:
                        steps.append(step)
                        url = _redirect_target(url, response)
                        continue
                    if not 200 <= response.status < 300:
                        raise MediaError(
                            f"HTTP {response.status} from {host}",
                            reason="http_5xx" if response.status >= 500 else "http_4xx",
                        )
                    if response.status != 200:
                        step = replace(step, obstacle=STATUS)
                    with self._answering(response):
                        body = await self._read_body(response, host, turn)
                    encoding = response.headers.get("Content-Encoding", "").strip().lower()
            except (aiohttp.ClientError, OSError, ValueError) as error:
                # ValueError: a header or an address that cannot be parsed.
                raise _network_error(host, error) from error
            return await self._unpack(body, encoding, host, turn), Trail((*steps, step))
        raise self._too_many_redirects(host)

    def _guarded_socket(self, address: Any) -> socket.socket:
        """Make the socket for one address, or refuse.

        aiohttp calls this with the very address that it then connects to, resolved or
        literal, so that a second look-up cannot give another (DNS rebinding).
        """
        family, kind, protocol, _, location = address
        if not self._policy.permits(location[0]):
            raise _AddressRefused("address refused")
        guarded = GuardedSocket(family, kind, protocol)
        self._sockets[guarded.fileno()] = guarded
        return guarded

    def _answering(self, response: aiohttp.ClientResponse) -> AbstractContextManager[None]:
        """Around the body of an answer, for which a socket reads."""
        transport = response.connection and response.connection.transport
        if transport is None:  # all of it is here
            return nullcontext()
        guarded = self._sockets[transport.get_extra_info("socket").fileno()]
        return guarded.answering(chunked="Transfer-Encoding" in response.headers)

    async def _read_body(self, response: aiohttp.ClientResponse, host: str, turn: Turn) -> bytes:
        limit = self._max_url_bytes
        length = response.content_length
        if length is not None and length > limit:
            raise too_large(f"media of {length} bytes from {host}", limit)
        most = limit if length is None else length
        room = chunks = 0
        # It gives its bytes without a copy of them; an error's frames do not keep what it has.
        with io.BytesIO() as body:
            while not response.content.at_eof():
                part, ends_chunk = await response.content.readchunk()
                turn.nbytes += len(part)
                if turn.nbytes > limit:
                    raise too_large(f"media from {host}", limit)
                chunks += ends_chunk
                if chunks > _FEW_CHUNKS + turn.nbytes // _CHUNK_BYTES:
                    raise MediaError(f"{host} sends its answer in tiny chunks", reason="chunks")
                if turn.nbytes > room:
                    # An announced length is not believed: no room is reserved by it.
                    more = max(_FIRST_BYTES, turn.nbytes // 4)
                    room = min(turn.nbytes + more, max(most, turn.nbytes))
                    await turn.grow(room)
                body.write(part)
                if turn.nbytes > _LARGE_BYTES:
                    async with self._large:
                        await asyncio.sleep(0)
            return body.getvalue()

    async def _unpack(self, body: bytes, encoding: str, host: str, turn: Turn) -> bytes:
        if encoding in _UNREADABLE_ENCODINGS or "," in encoding:
            raise MediaError(f"{host} sent content encoding {encoding[:40]!r} unasked")
        if encoding not in _ZLIB_ENCODINGS:  # identity, and labels that servers make up
            return body
        limit = self._max_url_bytes
        # "deflate" means zlib (RFC 9110), but some servers send it bare.
        is_bare = encoding == "deflate" and not (
            len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2]) % 31 == 0
        )
        parts = _unpacked(body, -zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
        room = 0
        with io.BytesIO() as data:
            while True:
                # Packed a thousandfold, a small body is much memory, and work for a thread.
                needed = len(body) + data.tell() + _STEP_BYTES
                if needed > room:
                    room = needed
                    await turn.grow(room)
                try:
                    part = await asyncio.to_thread(next, parts, None)
                except zlib.error:
                    raise MediaError(f"{host} sent a damaged {encoding} body") from None
                except EOFError:
                    raise MediaError(f"{host} sent a truncated {encoding} body") from None
                if part is None:
                    return data.getvalue()
                data.write(part)
                if data.tell() > limit:
                    raise too_large(f"unpacked media from {host}", limit)


def _unpacked(body: bytes, window: int) -> Iterator[bytes]:
    """A packed body's content, in parts of `_STEP_BYTES` at most, of which some may be empty;
    several members are one.

    Args:
        window: as of `zlib.decompressobj`.

    Raises:
        zlib.error: it is damaged.
        EOFError: it ends early.
    """
    packed, at, told = memoryview(body), 0, 0
    while True:
        stream = zlib.decompressobj(window)
        while not stream.eof:
            piece: bytes | memoryview = stream.unconsumed_tail
            if not piece:
                piece = packed[at : at + _PIECE_BYTES]
                at += len(piece)
            part = stream.decompress(piece, _STEP_BYTES)
            if not part and not piece:
                raise EOFError
            if part or at - told >= _PIECE_BYTES:  # a step ends, however little was in it
                told = at
                yield part
        at -= len(stream.unused_data)
        # Behind the last one there may be anything.
        if not body.startswith(_GZIP) or packed[at : at + 2] != _GZIP:
            return


class _AddressRefused(OSError):
    """Raised to aiohttp, which tries a host's other addresses on any OSError."""


def _redirect_target(url: URL, response: aiohttp.ClientResponse) -> URL:
    location = response.headers.get("Location")
    if not location:
        raise MediaError(f"HTTP {response.status} from {url.raw_host} without a Location")
    try:
        target = parse(urljoin(str(url), location))
        # Credentials were for the first host, and a Location may not bring its own.
        return target.with_user(None) if target.raw_host else target
    except (ValueError, MediaError):
        raise MediaError(f"{url.raw_host} redirects to a malformed URL") from None


def _network_error(host: str, error: Exception) -> EpdError:
    """Say what failed without the error's text, which may hold addresses or the URL."""
    cause = getattr(error, "os_error", error)  # of a connection that did not come about
    if isinstance(cause, _AddressRefused):
        return MediaForbiddenError(f"host {host} is not at a public address")
    if isinstance(cause, OSError) and cause.errno in _OWN_FAULTS:
        return UnavailableError(
            f"no connection can be opened here ({errno.errorcode[cause.errno]})"
        )
    for kind, reason, text in _NETWORK_REASONS:
        if isinstance(error, kind):
            return MediaError(text.format(host=host), reason=reason)
    return MediaError(f"{host} gave no valid HTTP answer ({type(cause).__name__})", reason="broken")


_NETWORK_REASONS: tuple[tuple[type[Exception], str, str], ...] = (
    (aiohttp.ClientConnectorDNSError, "dns", "host {host} cannot be resolved"),
    (
        aiohttp.ClientSSLError,
        "tls",
        "no secure connection to {host}: its certificate or TLS is at fault",
    ),
    (aiohttp.ClientConnectorError, "connect", "cannot connect to {host}"),
    (aiohttp.ServerTimeoutError, "connect", "cannot connect to {host} in time"),
    (
        aiohttp.ClientPayloadError,
        "broken",
        "{host} ended its answer before the whole body had arrived",
    ),
    (aiohttp.ServerDisconnectedError, "broken", "{host} closed the connection without an answer"),
    (aiohttp.ClientOSError, "broken", "the connection to {host} broke"),
    (aiohttp.InvalidURL, "url", "the media URL is malformed"),
)
