"""The metrics of a language server's receiver, in the server's own `/metrics`."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sglang_epd.tally import COUNTERS, Tally

_WAIT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PrometheusTally(Tally):
    """Also counts in the process's default registry, which SGLang's `/metrics` collects."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__()
        self._counters = {
            name: Counter(
                f"sglang:epd_receiver_{name}", text, [label] if label else [], registry=registry
            )
            for name, (label, text) in COUNTERS.items()
        }
        self._wait_seconds = Histogram(
            "sglang:epd_receiver_wait_seconds",
            "Time offers waited for memory before they were granted",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        shown = {
            "bytes": ("held_bytes", "Bytes granted, received or being read"),
            "waiting": ("waiting_offers", "Offers that wait for memory"),
            "quarantined": ("quarantined_blocks", "Revoked grants still being written to"),
            "kept": ("kept_bytes", "Bytes of embeddings that are kept for who asks again"),
        }
        self._gauges = {
            kind: Gauge(
                f"sglang:epd_receiver_{name}", text, multiprocess_mode="livesum", registry=registry
            )
            for kind, (name, text) in shown.items()
        }

    def add(self, name: str, kind: str = "", amount: int = 1) -> None:
        super().add(name, kind, amount)
        counter = self._counters[name]
        (counter.labels(kind) if COUNTERS[name][0] else counter).inc(amount)

    def waited(self, seconds: float) -> None:
        self._wait_seconds.observe(seconds)

    def held(self, nbytes: int, waiting: int, quarantined: int, kept: int = 0) -> None:
        self._gauges["bytes"].set(nbytes)
        self._gauges["waiting"].set(waiting)
        self._gauges["quarantined"].set(quarantined)
        self._gauges["kept"].set(kept)
