"""A real media server for the tests of those who ask one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

BODY = b"picture" * 1000


class Site:
    """A real server with one picture, which may be told how to answer.

    Attributes:
        headers: sent with each answer.
        etag: of the picture; a request that names it is answered 304, without a body.
        answer: answers instead, where it is set.
        asked: the requests that came, each with its path and what it was conditional on.
    """

    def __init__(self) -> None:
        self.body = BODY
        self.etag = '"v1"'
        self.headers: list[tuple[str, str]] = []
        self.answer: Callable[[web.Request], Any] | None = None
        self.asked: list[tuple[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        condition = request.headers.get("If-None-Match", "")
        condition = condition or request.headers.get("If-Modified-Since", "")
        self.asked.append((request.path, condition))
        await self.gate.wait()
        if self.answer is not None:
            answer = self.answer(request)
            return await answer if asyncio.iscoroutine(answer) else answer
        if self.etag and condition == self.etag:
            return self.response(status=304)
        return self.response(body=self.body)

    def response(self, **options: Any) -> web.Response:
        response = web.Response(**options)
        if self.etag:
            response.headers["ETag"] = self.etag
        for name, value in self.headers:
            response.headers.add(name, value)
        return response

    def take(self) -> list[tuple[str, str]]:
        """The requests since the last time."""
        asked, self.asked = self.asked, []
        return asked


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    """A site that is up."""
    site = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        site.gate.set()
        await runner.cleanup()
