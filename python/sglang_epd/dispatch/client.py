"""One encoder, over HTTP or gRPC."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Self

import aiohttp

from sglang_epd.dispatch.transport import (
    CONNECT_TIMEOUT_S,
    MAX_REPLY_BYTES,
    Answer,
    Transport,
    out_of_reach,
    written,
)
from sglang_epd.errors import (
    DeadlineError,
    EncoderLostError,
    EpdError,
    ProtocolError,
    TokenError,
    UnavailableError,
    from_code,
)
from sglang_epd.media.resolver import SystemResolver
from sglang_epd.trust import Trust
from sglang_epd.wire import rpc
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


class EncoderClient:
    """Sends encode requests; keeps connections alive. Use it from one event loop.

    Args:
        token: shared secret, sent as a bearer token; empty for none.
        tls: for encoders that are https:// URLs; without it the system's certificates count.
    """

    def __init__(self, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._headers = Trust(token).headers()
        self._http = Http(tls)
        self._rpc: Transport | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()
        if self._rpc is not None:
            await self._rpc.close()

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
            TokenError: it does not take this client's token.
            DeadlineError: no answer within the request's `ttl_s`.
            EpdError: the encoder refused the request as a whole.
        """
        sent = {**self._headers, **(headers or {})}
        transport = self._transport(url)
        answer = await transport.post(url, body_pieces(request), sent, request.ttl_s)
        if answer.status != 200:
            raise _refusal(url, answer)
        try:
            return decode_body(answer.body, EncodeReply, MAX_REPLY_BYTES)
        except ProtocolError as error:
            # Not the asker's fault, and another encoder may well make sense.
            raise UnavailableError(f"encoder {url} gave an unreadable answer: {error}") from None

    def _transport(self, url: str) -> Transport:
        if not url.startswith(rpc.SCHEME):
            return self._http
        if self._rpc is None:
            # gRPC is imported where an encoder wants it.
            from sglang_epd.dispatch.rpc import Rpc

            self._rpc = Rpc()
        return self._rpc


class Http:
    """A `Transport`: encoders over HTTP.

    Args:
        tls: for https:// URLs; without it the system's certificates count.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls: ssl.SSLContext | bool = tls or True
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: str, body: Sequence[bytes], headers: Mapping[str, str], ttl_s: float
    ) -> Answer:
        if self._session is None:
            self._session = open_session(resolver=SystemResolver())
        length = str(sum(map(len, body)))
        timeout = aiohttp.ClientTimeout(total=ttl_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{url}/v1/encode",
                data=_written(body),
                headers={**headers, "Content-Type": CONTENT_TYPE, "Content-Length": length},
                timeout=timeout,
                allow_redirects=False,
                ssl=self._tls,
            ) as response:
                return Answer(
                    response.status,
                    await read_body(response, MAX_REPLY_BYTES),
                    response.headers.get("Retry-After", ""),
                )
        except aiohttp.ConnectionTimeoutError:
            raise UnavailableError(f"encoder {url} did not accept a connection") from None
        except TimeoutError:
            raise DeadlineError(f"encoder {url} did not answer before the deadline") from None
        except aiohttp.ClientConnectorError as error:
            raise out_of_reach(url, type(error).__name__) from None
        except (aiohttp.ServerConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise EncoderLostError(
                f"encoder {url} went away while it had the request ({type(error).__name__})"
            ) from None
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            raise out_of_reach(url, type(error).__name__) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _written(pieces: Sequence[bytes]) -> AsyncIterator[memoryview]:
    for piece in written(pieces):
        yield piece


def _refusal(url: str, answer: Answer) -> EpdError:
    try:
        reply = decode_body(answer.body, ErrorReply, MAX_REPLY_BYTES)
    except ProtocolError:
        status = answer.status
        if status == HTTPStatus.UNAUTHORIZED:
            return TokenError(f"{url} refused this server's SGLANG_EPD_TOKEN (or --api-key)")
        return UnavailableError(f"{url} answered HTTP {status}: is it a sglang-epd encoder?")
    error = from_code(reply.code, f"encoder {url}: {reply.message}")
    again = answer.again
    error.retry_after_s = float(again) if again.isdecimal() and len(again) < 6 else None
    return error
