"""Where requests were encoded, and which encoders they named: metrics of a language server,
in the registry that SGLang's `/metrics` shows."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class DecisionMetrics:
    """`labels` values are bounded sets."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.decisions = Counter(
            "sglang:epd_dispatch_decisions",
            "Prompts with media by where they were encoded (remote, local), and why",
            ("where", "why"),
            registry=registry,
        )


class HeaderMetrics:
    """Of requests that name their encoders."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.unknown = Counter(
            "sglang:epd_dispatch_unknown_encoders",
            "Encoders that requests named and this server does not know",
            registry=registry,
        )
