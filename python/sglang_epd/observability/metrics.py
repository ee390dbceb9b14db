"""How metrics are declared, and a tally that counts in them."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, cast

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sglang_epd.tally import Tally

# How late an event loop is.
LAG_BUCKETS_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_Across = Literal["all", "max", "mostrecent", "livesum"]


class Metrics:
    """Metrics that subclasses declare as attributes, `items = counter("Items", "source")`.

    A metric's name in Prometheus is `prefix` and the attribute's name. Labels take few values.

    Args:
        registry: the process's own unless given; SGLang's `/metrics` shows that one.
    """

    prefix: ClassVar[str]

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        for name, declared in vars(type(self)).items():
            if isinstance(declared, partial):
                setattr(self, name, declared(f"{self.prefix}{name}", registry=registry))


def counter(text: str, *labels: str) -> Counter:
    return cast(Counter, partial(Counter, documentation=text, labelnames=labels))


def gauge(text: str, *labels: str, across: _Across = "all") -> Gauge:
    """A gauge; `across` says how the values of a server's processes are combined."""
    return cast(
        Gauge, partial(Gauge, documentation=text, labelnames=labels, multiprocess_mode=across)
    )


def histogram(text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    return cast(
        Histogram, partial(Histogram, documentation=text, labelnames=labels, buckets=buckets)
    )


class PrometheusTally(Tally):
    """Also counts in metrics; each name is one of their attributes."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def add(self, name: str, kind: str = "", amount: int = 1) -> None:
        super().add(name, kind, amount)
        self._of(name, kind).inc(amount)

    def observe(self, name: str, value: float, kind: str = "") -> None:
        self._of(name, kind).observe(value)

    def show(self, name: str, value: float) -> None:
        self._of(name).set(value)

    def _of(self, name: str, kind: str = "") -> Any:
        metric = getattr(self._metrics, name)
        return metric.labels(kind) if kind else metric
