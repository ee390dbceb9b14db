"""Answers one encode request, whichever transport it came by.

Token, admission, bounds of the body, cancellation when the asker leaves, metrics and spans are
the same for all transports. A transport (`app`, `rpc`) owns its connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sglang_epd import logs
from sglang_epd.encoder.breakage import drop_frames
from sglang_epd.encoder.service import EncoderService, Room
from sglang_epd.errors import EpdError, MediaTooLargeError, OverloadedError, UnavailableError
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.spans import OFF, Span
from sglang_epd.trust import Trust
from sglang_epd.wire.http import (
    CONTENT_TYPE,
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    decode_body,
    encode_body,
)

logger = logging.getLogger(__name__)

# nginx's "client closed request"; the client is gone, but logs and metrics have it.
_CLIENT_CLOSED = 499
# How long nothing may come of a body that is not all here, and how long all of it may take:
# its bytes are in work from the beginning, and an asker that was stopped never says so.
_SILENCE_S = 20.0
_BODY_S = 300.0
# Digits of a length; Python refuses to read thousands of them.
_MOST_DIGITS = 20


class Exchange(Protocol):
    """One request on its transport.

    Attributes:
        headers: by their names in small letters.
    """

    @property
    def headers(self) -> Mapping[str, str]: ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body, piece by piece.

        Raises:
            ClientDisconnect: the asker left.
        """

    async def gone(self) -> None:
        """Return when the asker has left; called once the body is here."""


@dataclass(frozen=True)
class Answering:
    """Answers encode requests.

    Attributes:
        trust: accepted tokens; without one all requests are.
        max_body_bytes: larger encode requests are refused with 413.
        begin_span: begins the span of an encode request, by its headers.
    """

    service: EncoderService
    metrics: EncoderMetrics
    trust: Trust
    max_body_bytes: int
    begin_span: Callable[[Mapping[str, str]], Span] = lambda _headers: OFF

    def authorised(self, headers: Mapping[str, str]) -> bool:
        # The bytes as they came.
        return self.trust.admits(headers.get("authorization", "").encode("latin-1"))

    def status(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """The encoder's state for anyone, and whether it takes encode requests of this asker."""
        state = self.service.status()
        return {
            **state,
            "tasks": len(asyncio.all_tasks()),
            "authorised": self.authorised(headers),
        }

    async def answer(self, exchange: Exchange) -> Response:
        with self.metrics.request_seconds.time():
            if self.authorised(exchange.headers):
                with self.begin_span(exchange.headers) as span:
                    response = await self._serve(exchange, span)
            else:
                response = Response(status_code=401)
        self.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def _serve(self, exchange: Exchange, span: Span) -> Response:
        try:
            with self.service.receiving() as room:
                body = await read_body(exchange, self.max_body_bytes, room)
                asked = decode_body(body, EncodeRequest, self.max_body_bytes)
                del body
                with logs.about(asked.asker or asked.request_id):
                    reply = await self._until_gone(exchange, asked, room, span)
        except EpdError as error:
            # Of a full encoder there are hundreds a second, which language servers send again.
            level = logging.DEBUG if isinstance(error, OverloadedError) else logging.WARNING
            logger.log(level, "Refused an encode request: %s (%s)", error, error.code)
            span.fail(error.code, error.message)
            self.metrics.refusals.labels(error.code).inc()
            drop_frames(error)  # they have the media
            return _refusal(error, self.service.retry_after_s)
        except ClientDisconnect:  # before all of the body was here
            reply = None
        if reply is None:
            span.fail("RequestCancelledError", "the asker left")
            return Response(status_code=_CLIENT_CLOSED)
        return Response(encode_body(reply), media_type=CONTENT_TYPE)

    async def _until_gone(
        self, exchange: Exchange, asked: EncodeRequest, room: Room, span: Span
    ) -> EncodeReply | None:
        """Run the request; None if the client left, or cancelled it, before it was done."""
        encoding = self.service.encode(asked, room, span)
        work = asyncio.create_task(encoding, name=f"encode {asked.request_id}")

        async def watch() -> None:
            await exchange.gone()
            work.cancel()

        watcher = asyncio.create_task(watch())
        try:
            return await work
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            return None
        finally:
            watcher.cancel()
            # An error's trace would hold this frame, and so the media.
            await asyncio.wait([watcher])


async def read_body(exchange: Exchange, max_bytes: int, room: Room) -> bytearray:
    """A request's body, whose bytes are counted before they are here.

    Raises:
        MediaTooLargeError: it has more than `max_bytes`.
        OverloadedError: there is no room for it.
        UnavailableError: it does not come to its end.
    """
    announced = exchange.headers.get("content-length", "")
    expected = int(announced[:_MOST_DIGITS]) if announced.isdecimal() else 0
    if expected > max_bytes:
        raise MediaTooLargeError(f"encode request over {max_bytes} bytes")
    room.take(expected)
    body = bytearray()
    clock = asyncio.get_running_loop().time
    until = clock() + _BODY_S
    try:
        async with asyncio.timeout(_SILENCE_S) as patience:
            async for piece in exchange.pieces():
                taken = max(expected, len(body))
                body += piece
                if len(body) > max_bytes:
                    raise MediaTooLargeError(f"encode request over {max_bytes} bytes")
                if len(body) > taken:
                    room.take(len(body) - taken)
                patience.reschedule(min(clock() + _SILENCE_S, until))
    except TimeoutError:
        raise UnavailableError("the rest of the encode request did not come") from None
    return body


def _refusal(error: EpdError, retry_after_s: float) -> Response:
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError):
        headers["Retry-After"] = f"{retry_after_s:.0f}"
    body = encode_body(ErrorReply(error.code, error.message))
    return Response(body, status_code=error.status, headers=headers, media_type=CONTENT_TYPE)
