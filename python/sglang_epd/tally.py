"""Counters of the payload channel and of dispatch, without a metrics library."""

from __future__ import annotations

from collections import Counter


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
