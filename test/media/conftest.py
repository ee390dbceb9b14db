from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

import sites
from media.samples import Handler, Serve


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> str:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            return await stack.enter_async_context(sites.up(app))

        yield start
