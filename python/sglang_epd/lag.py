"""How late an event loop is.

A loop that decodes, hashes or waits for the interpreter's lock answers nothing meanwhile: no
probe, no offer, no `/health`. A timer that fires late shows it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_PERIOD_S = 0.1


class LoopLag:
    """Measures the event loop that it is started in.

    Args:
        observe: called ten times a second with the seconds by which the timer was late.
    """

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, unless it has begun; to be called in the event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="loop lag")

    def stop(self) -> None:
        """End; may be called when it never began."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._observe(max(0.0, clock() - due))
