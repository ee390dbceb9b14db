"""Counters of the payload channel and of dispatch, without a metrics library, and the lag of
an event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

_PERIOD_S = 0.1


class Tally:
    """Counts in memory; `observability.metrics.PrometheusTally` shows the same in Prometheus."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, kind: str = "", amount: int = 1) -> None:
        """Count an event of one kind."""
        self.counts[name, kind] += amount

    def observe(self, name: str, value: float, kind: str = "") -> None:
        """One value of a distribution, of one kind."""

    def show(self, name: str, value: float) -> None:
        """A value as it is now."""

    def waited(self, seconds: float) -> None:
        """An offer got its answer after waiting that long for memory."""
        self.observe("wait_seconds", seconds)

    def held(self, nbytes: int, waiting: int, quarantined: int, kept: int = 0) -> None:
        """Bytes in use, offers that wait, blocks in quarantine, bytes kept for later: as
        they are now."""
        self.show("held_bytes", nbytes)
        self.show("waiting_offers", waiting)
        self.show("quarantined_blocks", quarantined)
        self.show("kept_bytes", kept)


class LoopLag:
    """Measures the event loop that it is started in.

    A loop that decodes, hashes or waits for the interpreter's lock answers nothing meanwhile:
    no probe, no offer, no `/health`. A timer that fires late shows it afterwards.

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
