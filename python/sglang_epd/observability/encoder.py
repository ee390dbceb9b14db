"""The encoder server's metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sglang_epd.tally import LAG_BUCKETS_S

_STAGE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Sized(Protocol):
    """What is shown of a cache."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...


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
        self.requests = Counter(
            "sglang:epd_encoder_requests",
            "Encode requests by HTTP status; 499 for those that were cancelled",
            ("status",),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "sglang:epd_encoder_request_seconds",
            "Time from an encode request's arrival until its answer, whatever that was",
            buckets=_STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.fetch_failures = Counter(
            "sglang:epd_encoder_fetch_failures",
            "Items whose media could not be had, by reason or error class",
            ("reason",),
            registry=self.registry,
        )
        self.url_lookups = Counter(
            "sglang:epd_encoder_url_lookups",
            "Media asked for by URL: fresh (nothing was asked), revalidated (304), changed, "
            "refetched (known, but its embedding was gone), missed (not known), or coalesced "
            "with another asker",
            ("outcome",),
            registry=self.registry,
        )
        self.url_uncacheable = Counter(
            "sglang:epd_encoder_url_uncacheable",
            "Answers of media servers that are not remembered, by what forbids it",
            ("reason",),
            registry=self.registry,
        )
        self.url_entries = Gauge(
            "sglang:epd_encoder_url_entries",
            "URLs whose content is known",
            registry=self.registry,
        )
        self.lookups = Counter(
            "sglang:epd_encoder_lookups",
            "Embeddings asked for: computed, cached, stored (in the shared store), or coalesced "
            "with one in the making",
            ("source",),
            registry=self.registry,
        )
        self.evictions = Counter(
            "sglang:epd_encoder_cache_evictions",
            "Embeddings that left the cache for room",
            registry=self.registry,
        )
        self.cache_bytes = Gauge(
            "sglang:epd_encoder_cache_bytes",
            "Embedding bytes on the encoder, in use or kept",
            registry=self.registry,
        )
        self.cache_entries = Gauge(
            "sglang:epd_encoder_cache_entries",
            "Embeddings on the encoder, in use or kept",
            registry=self.registry,
        )
        self.items_queued = Gauge(
            "sglang:epd_encoder_items_queued",
            "Embeddings that are being made, or wait to be",
            registry=self.registry,
        )
        self.patches_queued = Gauge(
            "sglang:epd_encoder_patches_queued",
            "Patches that are being encoded, or wait to be; estimated before preprocessing",
            registry=self.registry,
        )
        self.batch_items = Histogram(
            "sglang:epd_encoder_batch_items",
            "Items in a forward pass",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self.batch_patches = Histogram(
            "sglang:epd_encoder_batch_patches",
            "Patches in a forward pass",
            buckets=(64, 256, 1024, 4096, 16384, 65536, 262144),
            registry=self.registry,
        )
        self.batch_splits = Counter(
            "sglang:epd_encoder_batch_splits",
            "Forward passes that failed and were run again in halves",
            registry=self.registry,
        )
        self.lost = Counter(
            "sglang:epd_encoder_lost_items",
            "Items whose worker process died with them",
            registry=self.registry,
        )
        self.busy_seconds = Counter(
            "sglang:epd_encoder_busy_seconds",
            "Time in which a tower ran, summed over towers",
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
        self.loop_lag_seconds = Histogram(
            "sglang:epd_encoder_loop_lag_seconds",
            "How late a timer was that fires ten times a second in the server's event loop",
            buckets=LAG_BUCKETS_S,
            registry=self.registry,
        )

    def watch(self, cache: Sized) -> None:
        """Show a cache's size whenever metrics are asked for."""
        self.cache_bytes.set_function(lambda: cache.nbytes)
        self.cache_entries.set_function(lambda: len(cache))

    def watch_urls(self, remembered: Callable[[], int]) -> None:
        """Show how many URLs are remembered whenever metrics are asked for."""
        self.url_entries.set_function(remembered)
