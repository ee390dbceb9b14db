"""The metrics of language, prefill and decode servers, among SGLang's own."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from sglang_epd.errors import DeadlineError
from sglang_epd.observability.metrics import (
    LAG_BUCKETS_S,
    Metrics,
    PrometheusTally,
    counter,
    gauge,
    histogram,
)
from sglang_epd.wire.messages import DECLINE_TOO_LARGE

_FEW = (1, 2, 4, 8, 16, 32, 64)


class DispatchMetrics(Metrics):
    prefix = "sglang:epd_dispatch_"
    namespace = gauge(
        "Always 1; its label is the namespace that encoders have to share with this server",
        "namespace",
        across="max",
    )
    items = counter(
        "Items of requests, by where their KV or embedding came from: kv (covered by the prefix "
        "cache), language_cache, encoder_cache, coalesced, store, computed (by an encoder), or "
        "local (this server's tower)",
        "source",
    )
    retries = counter("Items that an encoder failed at, by error class", "reason")
    waits = counter("Times that items waited because no encoder was left to ask")
    moves = counter("Encoders that came into a state", "state")
    failures = counter("Requests whose media were not delivered, by error class", "reason")
    request_items = histogram(
        "Images, videos or audio clips in a request that has any", "modality", buckets=_FEW
    )
    request_encoders = histogram(
        "Encoders that one dispatch of a request's items asked, retries included", buckets=_FEW
    )
    media_seconds = histogram(
        "Time from a request's arrival until all of its media had been delivered",
        buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    )
    loop_lag_seconds = histogram(
        "How late a timer was that fires ten times a second, in the tokenizer's event loop and "
        "in the one that watches encoders (watcher)",
        "loop",
        buckets=LAG_BUCKETS_S,
    )
    encoders = gauge("Encoders that this server knows, by state", "state", across="mostrecent")


class DispatchTally(PrometheusTally):
    """Counts the outcomes of a language server's requests with media.

    Args:
        namespace: of the encoders that this server takes embeddings from.
        states: that an encoder may be in.
    """

    def __init__(
        self, namespace: str, states: Iterable[str], registry: CollectorRegistry = REGISTRY
    ) -> None:
        metrics = DispatchMetrics(registry)
        super().__init__(metrics)
        metrics.namespace.labels(namespace).set(1)
        # An increase is seen of a series that was there before, and a share of one that is there.
        metrics.failures.labels(DeadlineError.__name__)
        metrics.items.labels("computed")
        self._encoders = metrics.encoders
        self._states: Counter[str] = Counter()
        for state in states:
            metrics.moves.labels(state)
            # A worker that ended may have left another number.
            self._encoders.labels(state).set(0)

    def moved(self, old: str | None, new: str, *, stays: bool) -> None:
        """An encoder came into another state (None: it was not known).

        Args:
            stays: whether it is still known then.
        """
        self.add("moves", new)
        for state, change in ((old, -1), (new if stays else None, 1)):
            if state is not None:
                self._states[state] += change
                self._encoders.labels(state).set(self._states[state])


class DecisionMetrics(Metrics):
    prefix = "sglang:epd_dispatch_"
    decisions = counter(
        "Prompts with media by where they were encoded (remote, local), and why", "where", "why"
    )


class ReceiverMetrics(Metrics):
    prefix = "sglang:epd_receiver_"
    offers = counter("Offers of encoders")
    waits = counter("Offers that had to wait: for memory, or the prefix cache to be asked")
    grants = counter("Offers that were granted")
    declines = counter("Offers that were declined", "reason")
    hits = counter("Items whose embedding was here: when announced, or when offered", "when")
    evictions = counter("Embeddings that had to make room")
    withdrawals = counter("Grants that their encoder gave back")
    payloads = counter("Embeddings received, by the way they came", "landing")
    received_bytes = counter("Bytes of embeddings received")
    expired_grants = counter("Grants that no payload came for in time")
    expired_requests = counter("Requests whose items did not arrive by their deadline")
    dropped = counter("Messages dropped", "reason")
    wait_seconds = histogram(
        "Time offers waited until they were answered: for memory, or the prefix cache to be asked",
        buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    )
    held_bytes = gauge("Bytes granted, received or being read", across="livesum")
    waiting_offers = gauge("Offers that wait for memory", across="livesum")
    quarantined_blocks = gauge("Revoked grants still being written to", across="livesum")
    kept_bytes = gauge("Bytes of idle embeddings, kept for later requests", across="livesum")

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.declines.labels(DECLINE_TOO_LARGE)  # its first one is to be seen


class EarlyMetrics(Metrics):
    prefix = "sglang:epd_early_"
    parts = counter(
        "Parts of prompts that were to be prefilled before the last item landed: done, covered "
        "(by the prefix cache), withdrawn (the last item landed first), failed",
        "outcome",
    )
    tokens = counter("Prompt tokens that such parts have prefilled")


class DecodeMetrics(Metrics):
    prefix = "sglang:epd_decode_"
    prompts = counter(
        "Prompts with media by how they were laid out: with the prefill's layouts (known), by "
        "fetching the media (own), or not at all: for the request's own fault, or as its client "
        "has left (refused), or for a server's (failed)",
        "layout",
    )
    loop_lag_seconds = histogram(
        "How late a timer was that fires ten times a second, in the tokenizer's event loop",
        buckets=LAG_BUCKETS_S,
    )

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        # Also of a server that has had no media, which may be missed.
        for layout in ("known", "own", "refused", "failed"):
            self.prompts.labels(layout)


@functools.cache
def weights_bytes() -> Gauge:
    """What this process holds of its model."""
    return Gauge(
        "sglang:epd_language_weights_bytes",
        "Bytes of the language model's parameters and buffers, of all ranks of this server",
        multiprocess_mode="livesum",
    )
