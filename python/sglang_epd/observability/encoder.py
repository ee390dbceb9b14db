"""The encoder server's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STAGE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class EncoderMetrics:
    """One registry a server process; `labels` values are bounded sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.items = Counter(
            "sglang:epd_encoder_items",
            "Items by modality and outcome (delivered, declined, failed, cancelled)",
            ("modality", "outcome"),
            registry=self.registry,
        )
        self.failures = Counter(
            "sglang:epd_encoder_failures",
            "Failed items by error class",
            ("code",),
            registry=self.registry,
        )
        self.refusals = Counter(
            "sglang:epd_encoder_refusals",
            "Encode requests refused as a whole, by error class",
            ("code",),
            registry=self.registry,
        )
        self.bytes_delivered = Counter(
            "sglang:epd_encoder_delivered_bytes",
            "Embedding bytes taken by language servers, by landing (inline, shared, remote)",
            ("landing",),
            registry=self.registry,
        )
        self.items_in_work = Gauge(
            "sglang:epd_encoder_items_in_work", "Items in any stage", registry=self.registry
        )
        self.stage_seconds = Histogram(
            "sglang:epd_encoder_stage_seconds",
            "Time an item spends in a stage",
            ("stage",),
            buckets=_STAGE_BUCKETS_S,
            registry=self.registry,
        )
