"""What is counted on the payload channel, and while requests are dispatched."""

from __future__ import annotations

from collections import Counter

# Counters: the label that tells their kinds apart ("" for none), and what they count.
COUNTERS = {
    "offers": ("", "Offers of encoders"),
    "waits": ("", "Offers that had to wait for memory"),
    "grants": ("", "Offers that were granted"),
    "declines": ("reason", "Offers that were declined"),
    "hits": ("when", "Items whose embedding was here: when announced, or when offered"),
    "evictions": ("", "Embeddings that had to make room"),
    "withdrawals": ("", "Grants that their encoder gave back"),
    "payloads": ("landing", "Embeddings received, by the way they came"),
    "received_bytes": ("", "Bytes of embeddings received"),
    "expired_grants": ("", "Grants that no payload came for in time"),
    "expired_requests": ("", "Requests whose items did not arrive by their deadline"),
    "dropped": ("reason", "Messages dropped"),
}
DISPATCH_COUNTERS = {
    "items": (
        "source",
        "Items of requests, by where their KV or embedding came from: kv (covered by the prefix "
        "cache), language_cache, encoder_cache, coalesced, store, computed (by an encoder), or "
        "local (this server's tower)",
    ),
    "retries": ("reason", "Items that were sent again, by what their encoder failed of"),
    "waits": ("", "Times that items waited because no encoder was left to ask"),
    "moves": ("state", "Encoders that came into a state"),
    "failures": ("reason", "Requests whose media were not delivered, by error class"),
}
_FEW = (1, 2, 4, 8, 16, 32, 64)
# Distributions: the label, what they are of, and the buckets' bounds.
# Of how late an event loop is.
LAG_BUCKETS_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
DISPATCH_DISTRIBUTIONS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "request_items": ("modality", "Images, videos or sounds in a request that has any", _FEW),
    "request_encoders": ("", "Encoders that a request was sent to, retries included", _FEW),
    "media_seconds": (
        "",
        "Time from a request's arrival until all of its media had been delivered",
        (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
    ),
    "loop_lag_seconds": (
        "loop",
        "How late a timer was that fires ten times a second, in the tokenizer's event loop and "
        "in the one that watches encoders (watcher)",
        LAG_BUCKETS_S,
    ),
}


class Tally:
    """Counts in memory; `observability.receiver` and `.dispatch` add Prometheus."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, kind: str = "", amount: int = 1) -> None:
        """Count an event of the counters above, of one kind."""
        self.counts[name, kind] += amount

    def observe(self, name: str, value: float, kind: str = "") -> None:
        """One value of the distributions above, of one kind."""

    def waited(self, seconds: float) -> None:
        """An offer got its answer after waiting that long for memory."""

    def held(self, nbytes: int, waiting: int, quarantined: int, kept: int = 0) -> None:
        """Bytes in use, offers that wait, blocks in quarantine, bytes kept for later: as
        they are now."""
