"""Servers of aiohttp on loopback."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def up(
    app: web.Application, port: int = 0, tls: ssl.SSLContext | None = None, **how: Any
) -> AsyncIterator[str]:
    """The URL of an application that is served for so long.

    Args:
        port: 0 for any that is free.
        how: further options of `web.AppRunner`.
    """
    runner = web.AppRunner(app, shutdown_timeout=0.1, **how)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
