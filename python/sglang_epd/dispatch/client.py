"""One encoder, over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Self

import aiohttp

from sglang_epd.errors import (
    DeadlineError,
    EncoderLostError,
    EpdError,
    ProtocolError,
    UnavailableError,
    from_code,
)
from sglang_epd.wire.http import (
    CONTENT_TYPE,
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    body_pieces,
    decode_body,
    open_session,
    read_body,
)

_MAX_REPLY_BYTES = 16 << 20
_CONNECT_TIMEOUT_S = 2.0
_WRITTEN_BYTES = 256 << 10


class EncoderClient:
    """Sends encode requests; keeps connections alive. Use it from one event loop.

    Args:
        token: shared secret, sent as a bearer token; empty for none.
        tls: for encoders that are https:// URLs; without it the system's certificates count.
    """

    def __init__(self, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._headers = {"Content-Type": CONTENT_TYPE}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls: ssl.SSLContext | bool = tls or True
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def encode(
        self, url: str, request: EncodeRequest, headers: Mapping[str, str] | None = None
    ) -> EncodeReply:
        """Have the request's items encoded and delivered; returns when all have an outcome.

        Cancelling the call closes the connection, which cancels the work there.

        Args:
            headers: of its trace, sent along.

        Raises:
            UnavailableError: the encoder cannot be reached.
            EncoderLostError: it went away before it had answered.
            DeadlineError: no answer within the request's `ttl_s`.
            EpdError: the encoder refused the request as a whole.
        """
        if self._session is None:
            self._session = open_session()
        body = body_pieces(request)
        length = str(sum(map(len, body)))
        sent = {**self._headers, "Content-Length": length, **(headers or {})}
        timeout = aiohttp.ClientTimeout(total=request.ttl_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{url}/v1/encode",
                data=_written(body),
                headers=sent,
                timeout=timeout,
                allow_redirects=False,
                ssl=self._tls,
            ) as response:
                status, answer = response.status, await read_body(response, _MAX_REPLY_BYTES)
                again = response.headers.get("Retry-After", "")
        except aiohttp.ConnectionTimeoutError:
            raise UnavailableError(f"encoder {url} did not accept a connection") from None
        except TimeoutError:
            raise DeadlineError(f"encoder {url} did not answer before the deadline") from None
        except aiohttp.ClientConnectorError as error:
            raise _out_of_reach(url, error) from None
        except (aiohttp.ServerConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise EncoderLostError(
                f"encoder {url} went away while it had the request ({type(error).__name__})"
            ) from None
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise _out_of_reach(url, error) from None
        if status != 200:
            raise _refusal(url, status, answer, again)
        try:
            return decode_body(answer, EncodeReply, _MAX_REPLY_BYTES)
        except ProtocolError as error:
            # Not the asker's fault, and another encoder may well make sense.
            raise UnavailableError(f"encoder {url} gave an unreadable answer: {error}") from None


async def _written(pieces: Sequence[bytes]) -> AsyncIterator[memoryview]:
    """A body bit by bit, each when there is room for it."""
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _WRITTEN_BYTES):
            yield view[at : at + _WRITTEN_BYTES]


def _out_of_reach(url: str, error: Exception) -> UnavailableError:
    return UnavailableError(f"encoder {url} is out of reach ({type(error).__name__})")


def _refusal(url: str, status: int, body: bytes, again: str) -> EpdError:
    try:
        reply = decode_body(body, ErrorReply, _MAX_REPLY_BYTES)
    except ProtocolError:
        if status == HTTPStatus.UNAUTHORIZED:
            return UnavailableError(f"{url} refused this server's SGLANG_EPD_TOKEN (or --api-key)")
        return UnavailableError(f"{url} answered HTTP {status}: is it a sglang-epd encoder?")
    error = from_code(reply.code, f"encoder {url}: {reply.message}")
    error.retry_after_s = float(again) if again.isdecimal() and len(again) < 6 else None
    return error
