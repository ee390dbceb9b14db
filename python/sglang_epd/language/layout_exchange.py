"""`GET /epd/layouts/{room}`: a prefill server's board, and the decode server that reads it.

200  a `LayoutReply`: layouts, or the error that the request ended with; so do rooms that no
     request has opened
202  the media are still being encoded: ask again
401  the proof of the shared token is missing or wrong
404  the layouts of that request will not be known; and of any path, a server without this route

Waits at most `POLL_S` before it answers, so that a decode server which has gone is not
waited for much longer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from http import HTTPStatus

import aiohttp
from aiohttp import web
from yarl import URL

from sglang_epd.errors import DeadlineError, ProtocolError, UnavailableError, from_code
from sglang_epd.language.layouts import Board, Slot, refusal
from sglang_epd.media.resolver import SystemResolver
from sglang_epd.trust import Trust
from sglang_epd.wire.http import (
    CONTENT_TYPE,
    ItemLayout,
    LayoutReply,
    decode_body,
    open_session,
    read_body,
)

logger = logging.getLogger(__name__)


PATH = "/epd/layouts/{room:[0-9]{1,20}}"
POLL_S = 10.0
# The router sends a request to both servers at once; either may see it first. A prefill server
# may have a request of many media wait for ten seconds before it looks at it.
_UNHEARD_OF_S = 15.0
_MAX_REPLY_BYTES = 16 << 20
_CONNECT_TIMEOUT_S = 3.0
# Time for an answer beyond the server's wait.
_SLACK_S = 10.0
# Between two questions, after any answer.
_PAUSE_S = 0.05
# How long a server is asked again after a question without an answer, and how often.
_UNANSWERED_S, _AGAIN_S = 5.0, 0.5
# Longer than any request is given.
_LONGEST_S = 3600.0


def _silent() -> UnavailableError:
    return UnavailableError("the request's prefill server does not answer")


def authorization(token: str, room: int) -> str:
    """The `Authorization` header that proves the shared token for one room.

    Not the token itself: which server a decode server asks is said by the request, so
    by a user.
    """
    proof = hmac.new(token.encode(), f"epd layouts {room}".encode(), hashlib.sha256)
    return f"Bearer {proof.hexdigest()}"


class LayoutRoute:
    """Handles the route; use it from one event loop.

    Args:
        trust: tokens of decode servers that get an answer; all do without one.
    """

    def __init__(
        self,
        board: Board,
        trust: Trust,
        poll_s: float = POLL_S,
        unheard_of_s: float = _UNHEARD_OF_S,
    ) -> None:
        self._board = board
        self._trust = trust
        self._poll_s = poll_s
        self._unheard_of_s = unheard_of_s

    async def handle(self, request: web.Request) -> web.Response:
        room = int(request.match_info["room"])
        # The bytes as they came.
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        token = self._trust.token
        if token and not hmac.compare_digest(given, authorization(token, room).encode()):
            return web.Response(status=401)
        slot = await self._settled(room)
        if slot is None:
            unknown = UnavailableError("the prefill server knows nothing of this request")
            return web.Response(body=refusal(unknown), content_type=CONTENT_TYPE)
        if not slot.settled:
            return web.Response(status=202)
        if slot.body is None:
            return web.Response(status=404)
        return web.Response(body=slot.body, content_type=CONTENT_TYPE)

    async def _settled(self, room: int) -> Slot | None:
        """The room's slot as soon as it is settled, or as it is when waiting is over."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._board.watched(room, wake):
            while True:
                changed.clear()
                slot = self._board.look(room)
                if slot is not None and slot.settled:
                    return slot
                limit_s = self._poll_s if slot is not None else self._unheard_of_s
                try:
                    async with asyncio.timeout_at(started + limit_s):
                        await changed.wait()
                except TimeoutError:
                    return self._board.look(room)


class LayoutClient:
    """Asks prefill servers; keeps connections alive. Use it from one event loop.

    Args:
        token: shared secret; empty for none.
        longest_s: that a question is asked. The prefill server keeps the request's deadline, and
            says when it has passed.
    """

    def __init__(self, token: str, longest_s: float = _LONGEST_S) -> None:
        self._token = token
        self._longest_s = longest_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, host: str, port: int, room: int) -> list[ItemLayout] | None:
        """The layouts of a request's items, in the planner's order; waits for them.

        None where that bootstrap server will not know them, or does not run this package.

        Args:
            host, port: of the prefill server's bootstrap server.
            room: bootstrap room of the request.

        Raises:
            EpdError: the request failed there, so that it will never be prefilled.
            UnavailableError: the server does not answer, or not as this package does; or does not
                know the request, or does not take this server's token.
            DeadlineError: neither layouts nor failure came in `longest_s`.
        """
        try:
            url = URL.build(
                scheme="http", host=host.strip("[]"), port=port, path=f"/epd/layouts/{room}"
            )
            str(url)  # raises where the port is out of range
        except ValueError as error:
            logger.info("No layouts of %s:%s: %s", host, port, error)
            raise _silent() from None
        try:
            async with asyncio.timeout(self._longest_s):
                status, body = await self._answer(url, room)
        except TimeoutError:
            raise DeadlineError(
                "the request's media were not encoded before its deadline"
            ) from None
        if status == HTTPStatus.UNAUTHORIZED:
            raise UnavailableError("the prefill server does not take this server's token")
        if status == HTTPStatus.NOT_FOUND:
            return None
        try:
            if status != HTTPStatus.OK:
                raise ProtocolError(f"HTTP {status}")
            reply = decode_body(body, LayoutReply, _MAX_REPLY_BYTES)
        except ProtocolError as error:
            logger.warning("Prefill %s:%s tells unreadable layouts: %s", host, port, error)
            raise UnavailableError("the prefill server's layouts cannot be read") from None
        if reply.error is not None:
            raise from_code(reply.error.code, reply.error.message)
        return reply.items

    async def _answer(self, url: URL, room: int) -> tuple[int, bytes]:
        """The first answer but for 202.

        Raises:
            UnavailableError: there is none.
        """
        clock = asyncio.get_running_loop().time
        # Since when there are no answers.
        unanswered: float | None = None
        while True:
            asked = clock()
            answer = await self._get(url, room)
            if answer is None:
                unanswered = clock() if unanswered is None else unanswered
                if clock() - unanswered > _UNANSWERED_S:
                    raise _silent()
                await asyncio.sleep(_AGAIN_S)
            elif answer[0] != HTTPStatus.ACCEPTED:
                return answer
            else:
                unanswered = None
                # This package's own answer so after POLL_S; which server it is, a user may say.
                early = clock() - asked < POLL_S / 2
                await asyncio.sleep(_AGAIN_S if early else _PAUSE_S)

    async def _get(self, url: URL, room: int) -> tuple[int, bytes] | None:
        """One question; None without an answer."""
        if self._session is None:
            self._session = open_session(resolver=SystemResolver())
        headers = {"Authorization": authorization(self._token, room)} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=POLL_S + _SLACK_S, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.get(
                url, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await read_body(response, _MAX_REPLY_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            logger.info("%s: no layouts (%s)", url, type(error).__name__)
            return None
