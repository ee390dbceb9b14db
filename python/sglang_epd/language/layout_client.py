"""A decode server's question to a prefill server: the layouts of a request's media."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

import aiohttp
from yarl import URL

from sglang_epd import http_client
from sglang_epd.errors import DeadlineError, ProtocolError, from_code
from sglang_epd.http_client import read_body
from sglang_epd.language.layout_route import POLL_S, authorization
from sglang_epd.wire.http import ItemLayout, LayoutReply, decode_body

logger = logging.getLogger(__name__)

_MAX_REPLY_BYTES = 16 << 20
_CONNECT_TIMEOUT_S = 3.0
# Time for an answer beyond the server's wait.
_SLACK_S = 10.0
# Between two questions, after any answer.
_PAUSE_S = 0.05


class LayoutClient:
    """Asks prefill servers; keeps connections alive. Use it from one event loop.

    Args:
        token: shared secret; empty for none.
        timeout_s: the deadline of each question, from when it is asked.
    """

    def __init__(self, token: str, timeout_s: float) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, host: str, port: int, room: int) -> list[ItemLayout] | None:
        """The layouts of a request's items, in the planner's order; waits for them.

        Args:
            host, port: of the prefill's bootstrap server.
            room: the request's bootstrap room.

        Returns:
            None where that server does not know them, does not run this package or does
            not answer.

        Raises:
            EpdError: the request failed there, so that it will never be prefilled.
            DeadlineError: neither layouts nor failure came before the deadline.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineError("the request's media were not encoded before its deadline")
            answer = await self._get(host, port, room, min(left_s, POLL_S + _SLACK_S))
            if answer is None:
                if asyncio.get_running_loop().time() >= deadline:
                    continue  # it was this deadline that cut the question off
                return None
            status, body = answer
            if status != HTTPStatus.ACCEPTED:
                break
            await asyncio.sleep(_PAUSE_S)
        if status != HTTPStatus.OK:
            if status != HTTPStatus.NOT_FOUND:
                logger.info("Prefill %s:%s answers HTTP %d for layouts", host, port, status)
            return None
        try:
            reply = decode_body(body, LayoutReply, _MAX_REPLY_BYTES)
        except ProtocolError as error:
            logger.info("Prefill %s:%s tells unreadable layouts: %s", host, port, error)
            return None
        if reply.error is not None:
            raise from_code(reply.error.code, reply.error.message)
        return reply.items

    async def _get(
        self, host: str, port: int, room: int, timeout_s: float
    ) -> tuple[int, bytes] | None:
        """One question; None without an answer."""
        if self._session is None:
            self._session = http_client.session()
        headers = {"Authorization": authorization(self._token, room)} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            url = URL.build(
                scheme="http", host=host.strip("[]"), port=port, path=f"/epd/layouts/{room}"
            )
            async with self._session.get(
                url, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await read_body(response, _MAX_REPLY_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            logger.info("Prefill %s:%s gives no layouts (%s)", host, port, type(error).__name__)
            return None
