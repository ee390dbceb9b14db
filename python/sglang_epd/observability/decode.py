"""A decode server's metrics, in the registry that SGLang's `/metrics` shows."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter


class DecodeMetrics:
    """`labels` values are bounded sets."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.prompts = Counter(
            "sglang:epd_decode_prompts",
            "Prompts with media by how they were laid out: with the prefill's layouts "
            "(known), by fetching the media (own), or not at all (failed)",
            ("layout",),
            registry=registry,
        )
