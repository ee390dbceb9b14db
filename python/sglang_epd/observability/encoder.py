"""The encoder server's metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from sglang_epd.errors import EncodeError
from sglang_epd.observability.metrics import LAG_BUCKETS_S, Metrics, counter, gauge, histogram

if TYPE_CHECKING:
    from sglang_epd.cache import EmbeddingCache, Entry
    from sglang_epd.store import SharedStore
    from sglang_epd.store.backend import Breaker
    from sglang_epd.wire.http import EncodeItem, ItemOutcome

_STAGE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0)
_BREAKER_STATES = ("closed", "half_open", "open")


class Beside:
    """Other metrics of the same events: none, unless SGLang's names are asked for
    (`encoder.sglang_metrics`)."""

    def request(self, items: Sequence[EncodeItem]) -> Callable[[Sequence[ItemOutcome]], None]:
        """A request was accepted.

        Returns:
            A function that takes the items' outcomes at the request's end; none of a request that
            was cancelled.
        """
        return lambda _outcomes: None

    def found(self, modality: str, tokens: int, source: str) -> None:
        """An item's size is known, and where its embedding is from."""

    def made(self, modality: str, stages: Sequence[tuple[str, float, float]]) -> None:
        """An embedding was made; each stage has its name, when it began and when it ended."""

    def forward(self, modalities: Sequence[str], seconds: float) -> None:
        """A pass has ended, of items of these modalities."""

    def delivered(self, seconds: float) -> None:
        """An embedding was taken."""

    def evicted(self, modality: str) -> None:
        """An embedding left the cache for room."""

    def watch(self, cache: EmbeddingCache) -> None:
        """Show a cache's size."""

    def watch_tower(self, number: int, pending: Callable[[], int]) -> None:
        """Show how many items a tower has."""


class EncoderMetrics(Metrics):
    """One registry a server process.

    Attributes:
        beside: hears of the same events.
    """

    prefix = "sglang:epd_encoder_"
    items = counter(
        "Items by modality and outcome (delivered, declined, failed, cancelled)",
        "modality",
        "outcome",
    )
    failures = counter("Failed items by error class", "code")
    refusals = counter("Encode requests refused as a whole, by error class", "code")
    delivered_bytes = counter(
        "Embedding bytes taken by language servers, by landing (inline, shared, remote), or copied "
        "to be pushed to SGLang's own (pushed)",
        "landing",
    )
    requests = counter(
        "Encode requests by HTTP status; 499 for those that were cancelled", "status"
    )
    request_seconds = histogram(
        "Time from an encode request's arrival until its answer of any kind",
        buckets=_STAGE_BUCKETS_S,
    )
    fetch_failures = counter(
        "Items whose media could not be had, by reason or error class", "reason"
    )
    url_lookups = counter(
        "Media asked for by URL: fresh (nothing was asked), missed (read), or coalesced with "
        "another asker",
        "outcome",
    )
    url_uncacheable = counter(
        "Answers of media servers that are not remembered, by what forbids it", "reason"
    )
    lookups = counter(
        "Embeddings asked for: computed, cached, stored (in the shared store), or coalesced with "
        "one in the making",
        "source",
    )
    cache_evictions = counter("Embeddings that left the cache for room")
    cache_bytes = gauge("Embedding bytes on the encoder, in use or kept")
    items_queued = gauge("Embeddings that are being made, or wait to be")
    patches_queued = gauge(
        "Patches that are being encoded, or wait to be; estimated before preprocessing"
    )
    batch_items = histogram("Items in a forward pass", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
    batch_patches = histogram(
        "Patches in a forward pass; in all of a long video's",
        buckets=(64, 256, 1024, 4096, 16384, 65536, 262144),
    )
    towers = gauge("Vision towers, by whether they take work (alive) or not (lost)", "state")
    lost_items = counter("Items whose worker process died with them")
    busy_seconds = counter("Time in which a tower ran, summed over towers")
    stage_seconds = histogram("Time an item spends in a stage", "stage", buckets=_STAGE_BUCKETS_S)
    loop_lag_seconds = histogram(
        "How late a timer was that fires ten times a second in the server's event loop",
        buckets=LAG_BUCKETS_S,
    )

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.beside = Beside()
        super().__init__(self.registry)
        # A rate is seen of a series that was there before, and a share of one that is there.
        self.failures.labels(EncodeError.__name__)
        self.lookups.labels("computed")

    def evicted(self, entry: Entry) -> None:
        """An embedding left the cache for room."""
        self.cache_evictions.inc()
        self.beside.evicted(entry.layout.modality)

    def watch(self, cache: EmbeddingCache) -> None:
        """Show a cache's size whenever metrics are asked for."""
        self.beside.watch(cache)
        self.cache_bytes.set_function(lambda: cache.nbytes)

    def watch_towers(self, alive: Callable[[], Sequence[bool]]) -> None:
        """Show how many towers take work, whenever metrics are asked for."""
        self.towers.labels("alive").set_function(lambda: sum(alive()))
        self.towers.labels("lost").set_function(lambda: sum(not one for one in alive()))


class StoreMetrics(Metrics):
    """What a shared store did for its encoder."""

    prefix = "sglang:epd_encoder_store_"
    reads = counter(
        "Embeddings that the shared store was asked for, by outcome (hit, miss, expired, corrupt, "
        "too_large, error, timeout, busy, skipped)",
        "outcome",
    )
    writes = counter(
        "Embeddings for the shared store, by outcome (written, error, timeout, skipped, dropped, "
        "too_large), and entries removed",
        "outcome",
    )
    seconds = histogram(
        "Time that the shared store took, where it was asked",
        "direction",
        buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    )
    breaker = gauge(
        "Whether the shared store is asked: 0 closed (it is), 1 half-open, 2 open (it is not)",
        "direction",
    )

    def observe(self, direction: str, outcome: str, seconds: float) -> None:
        """Count a lookup or a write; `store.Observer`."""
        (self.reads if direction == "read" else self.writes).labels(outcome).inc()
        if seconds and outcome not in ("skipped", "busy"):  # it was asked
            self.seconds.labels(direction).observe(seconds)

    def watch(self, store: SharedStore) -> None:
        """Show a store's breakers."""
        for direction, name in (("read", "reads"), ("write", "writes")):
            code = partial(_breaker_code, store.breakers[name])
            self.breaker.labels(direction).set_function(code)


def _breaker_code(breaker: Breaker) -> float:
    return float(_BREAKER_STATES.index(breaker.state.value))
