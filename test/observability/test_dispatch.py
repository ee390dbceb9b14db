from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from sglang_epd.observability.dispatch import PrometheusDispatchTally


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_requests_are_told_by_their_items_and_encoders(registry):
    tally = PrometheusDispatchTally("ns", registry)
    for items in (1, 3):
        tally.observe("request_items", items, "IMAGE")
    tally.observe("request_encoders", 2)
    tally.observe("media_seconds", 0.2)

    def value(name, **labels):
        return registry.get_sample_value(f"sglang:epd_dispatch_{name}", labels)

    assert value("request_items_sum", modality="IMAGE") == 4
    assert value("request_items_bucket", modality="IMAGE", le="2.0") == 1
    assert value("request_encoders_count") == 1
    assert value("media_seconds_bucket", le="0.1") == 0
    assert value("media_seconds_bucket", le="0.3") == 1


def test_only_what_is_declared_is_counted(registry):
    tally = PrometheusDispatchTally("ns", registry)
    with pytest.raises(KeyError):
        tally.observe("surprises", 1.0)
    tally.add("failures", "MediaError")
    labels = {"reason": "MediaError"}
    assert registry.get_sample_value("sglang:epd_dispatch_failures_total", labels) == 1
