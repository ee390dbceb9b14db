"""Requests whose clients leave while their media are being encoded.

Leans on `TokenizerManager.abort_request(rid)`. SGLang asks for a client every 4 s, and of a
body of more than 64 KiB, which an image is, uvicorn has stopped reading: the first question
has it read on, and only the second, 8 s after the beginning, finds that nobody is there.
By then encoders have encoded what nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_LOOK_S = 0.5


@asynccontextmanager
async def aborted_when_left(manager: Any, obj: Any, http: Any) -> AsyncIterator[None]:
    """Around a request's answers: it is aborted soon after its client has left.

    Args:
        http: the client's request; None where there is none to leave.
    """
    if http is None or getattr(obj, "background", False):
        yield
        return

    async def look() -> None:
        while not await http.is_disconnected():  # noqa: ASYNC110, nobody tells
            await asyncio.sleep(_LOOK_S)
        manager.abort_request(obj.rid)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
