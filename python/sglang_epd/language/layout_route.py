"""`GET /epd/layouts/{room}`: a prefill server's board, as decode servers read it.

200  a `LayoutReply`
202  the media are still being encoded: ask again
401  the proof of the shared token is missing or wrong
404  nothing is known of that room

Waits at most `POLL_S` before it answers, so that a decode server which has gone is not
waited for much longer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from aiohttp import web

from sglang_epd.language.layouts import Board, Slot
from sglang_epd.trust import Trust
from sglang_epd.wire.http import CONTENT_TYPE

PATH = "/epd/layouts/{room:[0-9]{1,20}}"
POLL_S = 10.0
# The router sends a request to both servers at once; either may see it first.
_UNHEARD_OF_S = 5.0


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
        proofs = [authorization(token, room).encode() for token in self._trust.tokens]
        matches = [hmac.compare_digest(given, proof) for proof in proofs]
        if matches and not any(matches):
            return web.Response(status=401)
        slot = await self._settled(room)
        if slot is None:
            return web.Response(status=404)
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
