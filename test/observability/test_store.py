from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from sglang_epd.observability.encoder import EncoderMetrics, StoreMetrics
from sglang_epd.store import SharedStore, StoreUrl
from sglang_epd.store.backend import StoreError
from store.fakes import FakeBackend, image, key_of
from waiting import until


async def test_what_a_store_did_can_be_read_in_the_encoders_metrics():
    metrics = EncoderMetrics()
    observer = StoreMetrics(metrics.registry)
    backend = FakeBackend()
    url = StoreUrl.parse("file:///nowhere")
    store = SharedStore(backend, url, token="", timeout_s=5.0, observer=observer.observe)
    observer.watch(store)

    def value(name: str, **labels: str) -> float:
        name = f"sglang:epd_encoder_store_{name}"
        return metrics.registry.get_sample_value(name, labels) or 0.0

    store.keep(key_of(1), *image())
    await until(lambda: value("writes_total", outcome="written"))
    assert await store.find(key_of(1), "IMAGE") is not None
    assert await store.find(key_of(2), "IMAGE") is None
    assert value("reads_total", outcome="hit") == value("reads_total", outcome="miss") == 1
    for direction in ("read", "write"):
        assert value("breaker", direction=direction) == 0
    assert value("seconds_count", direction="read") == 2
    backend.error = StoreError("down")
    for number in range(6):
        await store.find(key_of(number), "IMAGE")
    assert value("breaker", direction="read") == 2
    assert value("breaker", direction="write") == 0
    assert value("reads_total", outcome="skipped") == 1
    backend.error = None
    await store.close()


def test_nothing_is_shown_of_a_store_that_is_not_there():
    assert b"store" not in generate_latest(EncoderMetrics().registry).replace(
        b"stored (in the shared store)", b""
    )


@pytest.mark.parametrize("outcome", ["dropped", "too_large"])
def test_what_was_not_asked_of_the_store_has_no_duration(outcome: str):
    metrics = EncoderMetrics()
    StoreMetrics(metrics.registry).observe("write", outcome, 0.0)
    name = "sglang:epd_encoder_store_"
    get = metrics.registry.get_sample_value
    assert get(f"{name}writes_total", {"outcome": outcome}) == 1
    assert not get(f"{name}seconds_count", {"direction": "write"})
