"""The metrics of a language server's dispatch, in the server's own `/metrics`."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sglang_epd.tally import DISPATCH_COUNTERS, DISPATCH_DISTRIBUTIONS, Tally


class PrometheusDispatchTally(Tally):
    """Also counts in the process's default registry, which SGLang's `/metrics` collects.

    Args:
        namespace: of the encoders that this server takes embeddings from.
    """

    def __init__(self, namespace: str, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__()
        identity = Gauge(
            "sglang:epd_dispatch_namespace",
            "Always 1; its label is the namespace that encoders have to share with this server",
            ["namespace"],
            multiprocess_mode="max",
            registry=registry,
        )
        identity.labels(namespace).set(1)
        self._counters = {
            name: Counter(
                f"sglang:epd_dispatch_{name}", text, [label] if label else [], registry=registry
            )
            for name, (label, text) in DISPATCH_COUNTERS.items()
        }
        self._distributions = {
            name: Histogram(
                f"sglang:epd_dispatch_{name}",
                text,
                [label] if label else [],
                buckets=buckets,
                registry=registry,
            )
            for name, (label, text, buckets) in DISPATCH_DISTRIBUTIONS.items()
        }
        self._encoders = Gauge(
            "sglang:epd_dispatch_encoders",
            "Encoders that this server knows, by state",
            ["state"],
            multiprocess_mode="max",
            registry=registry,
        )

    def add(self, name: str, kind: str = "", amount: int = 1) -> None:
        super().add(name, kind, amount)
        counter = self._counters[name]
        (counter.labels(kind) if DISPATCH_COUNTERS[name][0] else counter).inc(amount)

    def observe(self, name: str, value: float, kind: str = "") -> None:
        distribution = self._distributions[name]
        labelled = DISPATCH_DISTRIBUTIONS[name][0]
        (distribution.labels(kind) if labelled else distribution).observe(value)

    def moved(self, old: str | None, new: str, *, stays: bool) -> None:
        """An encoder came into another state (None: it was not known).

        Args:
            stays: whether it is still known then.
        """
        self.add("moves", new)
        if old is not None:
            self._encoders.labels(old).dec()
        if stays:
            self._encoders.labels(new).inc()
