"""A real media server for the tests of those who ask one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

import sites

BODY = b"picture" * 1000


FRESH = [("Cache-Control", "max-age=60")]


class Site:
    """A real server with one picture, which may be told how to answer.

    Attributes:
        headers: sent with each answer; the picture may be kept for a minute.
        answer: answers instead, where it is set.
        asked: the paths of the requests that came.
    """

    def __init__(self) -> None:
        self.body = BODY
        self.headers = FRESH
        self.answer: Callable[[web.Request], Any] | None = None
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        await self.gate.wait()
        if self.answer is not None:
            answer = self.answer(request)
            return await answer if asyncio.iscoroutine(answer) else answer
        return self.response(body=self.body)

    def response(self, **options: Any) -> web.Response:
        response = web.Response(**options)
        for name, value in self.headers:
            response.headers.add(name, value)
        return response

    def take(self) -> list[str]:
        """The paths of the requests since the last time."""
        asked, self.asked = self.asked, []
        return asked


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    """A site that is up."""
    site = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.handle)
    async with sites.up(app) as site.url:
        try:
            yield site
        finally:
            site.gate.set()
