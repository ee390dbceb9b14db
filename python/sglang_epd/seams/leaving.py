"""Requests whose clients leave while their media are being encoded.

Leans on `TokenizerManager.abort_request(rid)`. SGLang asks for a client every 4 s, and of a
body of more than 64 KiB, which an image is, uvicorn has stopped reading: the first question
has it read on, and only the second, 8 s after the beginning, finds that nobody is there.
By then encoders have encoded what nobody waits for. Here the second question comes at once, and
the pauses grow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5


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
        pause_s = _FIRST_LOOK_S
        while not await http.is_disconnected():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        manager.abort_request(obj.rid)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
