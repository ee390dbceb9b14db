"""An encoder's metrics under SGLang's names, for dashboards of in-tree EPD.

Shown beside this package's own with `--enable-metrics`, by which SGLang's encoders show them, and
with their labels. The towers of an encoder are one here: `dp_rank` is 0, but for the
gauge that each tower has of its own.

Leans on `observability.metrics_collector.EncoderMetricsCollector(labels)`: its metrics, labels and
buckets are taken as they are, and made by the classes that it has as `_counter_cls`, `_gauge_cls`
and `_histogram_cls`. `encoder.runtime` makes the gauge of towers itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from sglang_epd.cache import EmbeddingCache
from sglang_epd.observability.encoder import Beside
from sglang_epd.wire.http import EncodeItem, ItemOutcome

# SGLang's wait in a queue is before all else; an item also waits for its pass.
_WAITS = ("wait", "queue")


class SglangMetrics(Beside):
    """Counts into SGLang's collector.

    Args:
        labels: `model_name`, and what `--extra-metric-labels` adds.
        backend: `--encoder-transfer-backend`, a label of one metric.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str], backend: str) -> None:
        from sglang.srt.observability.metrics_collector import EncoderMetricsCollector

        class Collector(EncoderMetricsCollector):
            _counter_cls = partial(prometheus_client.Counter, registry=registry)
            _gauge_cls = partial(prometheus_client.Gauge, registry=registry)
            _histogram_cls = partial(prometheus_client.Histogram, registry=registry)

        self._labels = labels
        self._backend = backend
        self._collector: Any = Collector({**labels, "dp_rank": "0"})
        self._pending = prometheus_client.Gauge(
            "sglang:encoder_dp_pending_requests",
            "Number of pending requests per encoder DP rank.",
            [*labels, "dp_rank"],
            registry=registry,
        )

    def request(self, items: Sequence[EncodeItem]) -> Callable[[Sequence[ItemOutcome]], None]:
        began = perf_counter()
        asked = Counter(item.modality.lower() for item in items)
        for modality, count in asked.items():
            self._collector.inc_requests_received(modality)
            self._collector.observe_mm_items_per_request(count, modality)

        def ended(outcomes: Sequence[ItemOutcome]) -> None:
            well = {one.item for one in outcomes if one.state != "failed"}
            bad = {item.modality.lower() for item in items if item.item not in well}
            for modality in asked:
                self._collector.inc_requests_total(
                    modality, "error" if modality in bad else "success"
                )
                self._collector.observe_request_e2e_latency(perf_counter() - began, modality)

        return ended

    def found(self, modality: str, tokens: int, source: str) -> None:
        hit = source != "computed"
        self._collector.record_cache_tokens(tokens * hit, tokens, modality.lower())
        self._collector.record_cache_files(int(hit), 1, modality.lower())

    def made(self, modality: str, stages: Sequence[tuple[str, float, float]]) -> None:
        spent: Counter[str] = Counter()
        for name, began, ended in stages:
            spent["wait" if name in _WAITS else name] += ended - began  # type: ignore[assignment]
        # Neither is there of what a store had.
        if "preprocess" in spent:
            self._collector.observe_queue_wait(spent["wait"], modality.lower())
            self._collector.observe_preprocess(spent["preprocess"], modality.lower())

    def forward(self, modalities: Sequence[str], seconds: float) -> None:
        for modality, count in Counter(map(str.lower, modalities)).items():
            self._collector.observe_model_forward(seconds * count / len(modalities), modality)
            self._collector.observe_mm_items_per_batch(count, modality)

    def delivered(self, seconds: float) -> None:
        self._collector.observe_transfer(seconds, self._backend)

    def evicted(self, modality: str) -> None:
        self._collector.inc_cache_evictions(modality.lower())

    def watch(self, cache: EmbeddingCache) -> None:
        labels = self._collector.labels
        self._collector.cache_size_mb.labels(**labels).set_function(lambda: cache.nbytes / 2**20)
        self._collector.cache_entries.labels(**labels).set_function(lambda: len(cache))

    def watch_tower(self, number: int, pending: Callable[[], int]) -> None:
        self._pending.labels(**self._labels, dp_rank=str(number)).set_function(pending)


def create(registry: CollectorRegistry) -> Beside:
    """By this server's flags: SGLang's names where they ask for them."""
    from sglang.srt.runtime_context import get_disagg, get_observability, get_serving

    told = get_observability()
    if not told.enable_metrics:
        return Beside()
    labels = {"model_name": get_serving().served_model_name, **(told.extra_metric_labels or {})}
    return SglangMetrics(registry, labels, get_disagg().encoder_transfer_backend)
