"""An encoder's work in SGLang's own metrics: each of them counts, with SGLang's labels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from encoder.towers import until
from packages import sglang_module
from sglang_epd.encoder import sglang_metrics
from sglang_epd.encoder.sglang_metrics import SglangMetrics
from sglang_epd.errors import MediaError
from sglang_epd.observability.encoder import Beside, EncoderMetrics

LABELS = {"model_name": "tiny", "team": "a"}
# An embedding of the fakes has three rows of four float32.
ROWS, NBYTES = 3, 48


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    sglang_module("observability.metrics_collector")


@pytest.fixture
def metrics() -> EncoderMetrics:
    metrics = EncoderMetrics()
    metrics.beside = SglangMetrics(metrics.registry, LABELS, "zmq_to_scheduler")
    return metrics


@pytest.fixture
def capacity() -> int:
    return 2 * NBYTES


@pytest.fixture
def counted(metrics, cache) -> Callable[..., float | None]:
    metrics.watch(cache)

    def value(name: str, **labels: str) -> float | None:
        told = {**LABELS, "dp_rank": "0", **labels}
        return metrics.registry.get_sample_value(f"sglang:encoder_{name}", told)

    return value


async def test_every_metric_counts(service, fakes, asking, metrics, counted):
    fakes.preprocess.failures[b"bad"] = MediaError("no picture")
    await service.encode(asking(b"one", b"two"))
    await service.encode(asking(b"two", request_id="r2"))
    await service.encode(asking(b"bad", request_id="r3"))
    # Where there is room for two, and a sound is another modality.
    await service.encode(asking(b"sound", request_id="r4", modality="AUDIO"))
    image = {"modality": "image"}
    assert counted("requests_received_total", **image) == 3
    assert counted("requests_total", **image, status="success") == 2
    assert counted("requests_total", **image, status="error") == 1
    assert counted("request_e2e_latency_seconds_count", **image) == 3
    assert counted("mm_items_per_request_sum", **image) == 4
    assert counted("cache_total_tokens_total", **image) == 3 * ROWS
    assert counted("cache_hit_tokens_total", **image) == ROWS
    assert counted("cache_total_files_total", **image) == 3
    assert counted("cache_hit_files_total", **image) == 1
    assert counted("cache_evictions_total", **image) == 1
    assert counted("cache_entries") == 2
    assert counted("cache_size_mb") == 2 * NBYTES / 2**20
    assert counted("queue_wait_seconds_count", **image) == 2
    assert counted("preprocess_seconds_count", **image) == 2
    assert counted("model_forward_seconds_count", **image) == 2
    assert counted("mm_items_per_batch_sum", **image) == 2
    assert counted("mm_items_per_batch_sum", modality="audio") == 1
    assert counted("transfer_seconds_count", backend="zmq_to_scheduler") == 4
    assert counted("dp_pending_requests") == 0
    silent = {
        family.name
        for family in metrics.registry.collect()
        if family.name.startswith("sglang:encoder_") and not family.samples
    }
    assert not silent


async def test_what_a_tower_has_is_pending(service, fakes, asking, counted):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"one", b"two")))
    await until(lambda: counted("dp_pending_requests") == 2)
    fakes.forwarded.go_on()
    await work
    assert counted("dp_pending_requests") == 0


async def test_a_request_that_is_cancelled_is_an_error(service, fakes, asking, counted):
    fakes.forwarded.hold()
    work = asyncio.create_task(service.encode(asking(b"one")))
    await fakes.forwarded.entered.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    fakes.forwarded.go_on()
    assert counted("requests_total", modality="image", status="error") == 1


def test_the_time_of_a_pass_is_shared_by_its_modalities(metrics, counted):
    metrics.beside.forward(["IMAGE", "AUDIO", "IMAGE", "IMAGE"], 2.0)
    assert counted("model_forward_seconds_sum", modality="image") == 1.5
    assert counted("model_forward_seconds_sum", modality="audio") == 0.5


@pytest.mark.parametrize("asked", [True, False])
def test_they_are_there_where_sglangs_would_be(monkeypatch, asked):
    told = {
        "get_observability": {"enable_metrics": asked, "extra_metric_labels": {"team": "a"}},
        "get_serving": {"served_model_name": "tiny"},
        "get_disagg": {"encoder_transfer_backend": "mooncake"},
    }
    for name, fields in told.items():
        monkeypatch.setattr(
            import_module("sglang.srt.runtime_context"),
            name,
            lambda fields=fields: SimpleNamespace(**fields),
        )
    registry = CollectorRegistry()
    beside = sglang_metrics.create(registry)
    if not asked:
        assert type(beside) is Beside
        assert not [*registry.collect()]
        return
    beside.delivered(0.1)
    labels = {**LABELS, "dp_rank": "0", "backend": "mooncake"}
    assert registry.get_sample_value("sglang:encoder_transfer_seconds_count", labels) == 1
