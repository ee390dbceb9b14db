from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

import sglang_epd
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.observability.language import (
    DecodeMetrics,
    DispatchTally,
    PrometheusTally,
    ReceiverMetrics,
)
from sglang_epd.tally import Tally

PREFIX = "sglang:epd_receiver_"
STATES = ("joining", "ready", "open")


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    """In place of the process's default one, which may hold these metrics already."""
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def tally(registry):
    return PrometheusTally(ReceiverMetrics(registry))


@pytest.fixture
def value(registry):
    """A sample by its name; None where there is none."""
    return lambda name, **labels: registry.get_sample_value(f"{PREFIX}{name}", labels)


def test_the_channels_tally_counts_in_memory_and_in_prometheus(tally, value):
    tally.add("declines", "unknown")
    tally.add("declines", "duplicate", 2)
    tally.add("offers")
    assert value("declines_total", reason="unknown") == tally.counts["declines", "unknown"] == 1
    assert value("declines_total", reason="duplicate") == tally.counts["declines", "duplicate"] == 2
    assert value("offers_total") == tally.counts["offers", ""] == 1
    tally.held(4096, 2, 1, 7)
    tally.held(8192, 3, 0, 9)
    names = ("held_bytes", "waiting_offers", "quarantined_blocks", "kept_bytes")
    assert [value(name) for name in names] == [8192, 3, 0, 9]
    tally.waited(0.02)
    tally.waited(50.0)
    assert value("wait_seconds_count") == 2
    assert value("wait_seconds_bucket", le="0.03") == 1
    assert value("wait_seconds_bucket", le="100.0") == 2


def test_without_prometheus_the_same_is_counted_in_memory():
    tally = Tally()
    tally.add("dropped", "ProtocolError")
    tally.waited(1.0)
    tally.held(1, 2, 3)
    assert tally.counts == {("dropped", "ProtocolError"): 1}


def test_every_event_that_the_channel_counts_is_known_with_its_kind(registry):
    """A name that is not would be an exception in the receiver's thread."""
    metrics, found = ReceiverMetrics(registry), set()
    for path in (Path(sglang_epd.__file__).parent / "transfer").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("tally.add"):
                name, *kind = node.args
                found.add(ast.literal_eval(name))
                labels = getattr(metrics, ast.literal_eval(name))._labelnames
                assert len(kind) == len(labels), ast.unparse(node)
    counters = {
        name for name, one in vars(metrics).items() if isinstance(one, prometheus_client.Counter)
    }
    assert found == counters


def page(folder: Path, *counts: str) -> str:
    """A server's metrics page, once one more of its processes has counted so, and ended."""
    code = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess",
        "from sglang_epd.observability.language import *",
        *counts,
        "page = CollectorRegistry()",
        "multiprocess.MultiProcessCollector(page)",
        "print(generate_latest(page).decode())",
    )
    return subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
    ).stdout


def test_the_servers_metrics_page_shows_what_a_scheduler_counted(tmp_path):
    """Each of SGLang's processes writes files, which the page adds up while they live."""
    shown = page(
        tmp_path,
        "tally = PrometheusTally(ReceiverMetrics())",
        "tally.add('payloads', 'shared')",
        "tally.held(4096, 1, 0)",
    )
    assert f'{PREFIX}payloads_total{{landing="shared"}} 1.0' in shown
    assert f"{PREFIX}held_bytes 4096.0" in shown


def test_what_alerts_ask_for_is_there_before_it_happens():
    """An increase is seen of a series that was there before; a server may be missed by one."""
    registry = CollectorRegistry()
    ReceiverMetrics(registry)
    DecodeMetrics(registry)
    DispatchTally("ns", STATES, registry)
    for name, labels in (
        ("receiver_declines", {"reason": "too_large"}),
        ("decode_prompts", {"layout": "failed"}),
        ("dispatch_moves", {"state": STATES[0]}),
        ("dispatch_failures", {"reason": "DeadlineError"}),
    ):
        assert registry.get_sample_value(f"sglang:epd_{name}_total", labels) == 0.0


def test_a_worker_that_ended_does_not_keep_encoders_ready(tmp_path):
    """Its files stay; the alert looks at those of the worker that came in its place."""
    for number, state in ((2, "ready"), (1, "open")):
        told = page(
            tmp_path,
            f"tally = DispatchTally('ns', {STATES})",
            f"for _ in range({number}):",
            "    tally.moved(None, 'joining', stays=True)",
            f"    tally.moved('joining', {state!r}, stays=True)",
        )
    shown = dict(re.findall(r'epd_dispatch_encoders{state="(\w+)"} (\S+)', told))
    assert shown == {"joining": "0.0", "ready": "0.0", "open": "1.0"}


def test_requests_are_told_by_their_items_and_encoders(registry):
    tally = DispatchTally("ns", STATES, registry)
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
    assert value("namespace", namespace="ns") == 1
    # Rules ask for an increase, and shares for a part, of series that have to be there before.
    assert value("failures_total", reason="DeadlineError") == 0
    assert value("items_total", source="computed") == 0


def test_only_what_is_declared_is_counted(registry):
    with pytest.raises(AttributeError):
        DispatchTally("ns", STATES, registry).observe("surprises", 1.0)


def test_an_encoder_shows_what_rules_and_shares_are_of_before_it_happens():
    shown = EncoderMetrics().registry.get_sample_value
    assert shown("sglang:epd_encoder_failures_total", {"code": "EncodeError"}) == 0
    assert shown("sglang:epd_encoder_lookups_total", {"source": "computed"}) == 0
