"""What a shared store did for its encoder, in the encoder's registry."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_BREAKER_STATES = ("closed", "half_open", "open")


class Watched(Protocol):
    """What is shown of a store whenever metrics are asked for."""

    @property
    def breakers(self) -> Mapping[str, Any]:
        """By direction; each has a `state` whose `value` is its name."""

    @property
    def queued_bytes(self) -> int: ...


class StoreMetrics:
    """Counts what `store.Observer` is told."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reads = Counter(
            "sglang:epd_encoder_store_reads",
            "Embeddings that the shared store was asked for, by outcome (hit, miss, expired, "
            "corrupt, too_large, error, timeout, busy, skipped)",
            ("outcome",),
            registry=registry,
        )
        self._writes = Counter(
            "sglang:epd_encoder_store_writes",
            "Embeddings for the shared store, by outcome (written, error, timeout, skipped, "
            "dropped, too_large), and entries removed",
            ("outcome",),
            registry=registry,
        )
        self._bytes = Counter(
            "sglang:epd_encoder_store_bytes",
            "Embedding bytes read from the shared store and written to it",
            ("direction",),
            registry=registry,
        )
        self._seconds = Histogram(
            "sglang:epd_encoder_store_seconds",
            "Time that the shared store took, whatever came of it",
            ("direction",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._breaker = Gauge(
            "sglang:epd_encoder_store_breaker",
            "Whether the shared store is asked: 0 closed (it is), 1 half-open, 2 open (it is not)",
            ("direction",),
            registry=registry,
        )
        self._queued = Gauge(
            "sglang:epd_encoder_store_queued_bytes",
            "Embedding bytes that wait to be written to the shared store",
            registry=registry,
        )

    def read(self, outcome: str, seconds: float, nbytes: int) -> None:
        self._reads.labels(outcome).inc()
        self._seconds.labels("read").observe(seconds)
        self._bytes.labels("read").inc(nbytes)

    def wrote(self, outcome: str, seconds: float, nbytes: int) -> None:
        self._writes.labels(outcome).inc()
        if seconds:
            self._seconds.labels("write").observe(seconds)
        if outcome == "written":
            self._bytes.labels("write").inc(nbytes)

    def watch(self, store: Watched) -> None:
        """Show a store's breakers and its queue."""
        for direction, name in (("read", "reads"), ("write", "writes")):
            code = partial(_breaker_code, store.breakers[name])
            self._breaker.labels(direction).set_function(code)
        self._queued.set_function(lambda: store.queued_bytes)


def _breaker_code(breaker: Any) -> float:
    return float(_BREAKER_STATES.index(breaker.state.value))
