from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import prometheus_client
import pytest

import sglang_epd
from sglang_epd.observability import receiver
from sglang_epd.tally import COUNTERS, Tally

PREFIX = "sglang:epd_receiver_"


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    """In place of the process's default one, which may hold these metrics already."""
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def tally(registry):
    return receiver.PrometheusTally(registry)


@pytest.fixture
def value(registry):
    """A sample by its name; None where there is none."""
    return lambda name, **labels: registry.get_sample_value(f"{PREFIX}{name}", labels)


@pytest.mark.parametrize("name", COUNTERS)
def test_each_event_is_counted_here_and_there(tally, value, name):
    label = COUNTERS[name][0]
    kind = "some" if label else ""
    labels = {label: kind} if label else {}
    tally.add(name, kind)
    tally.add(name, kind, amount=4)
    assert tally.counts[name, kind] == 5
    assert value(f"{name}_total", **labels) == 5


def test_kinds_are_counted_apart(tally, value):
    tally.add("declines", "unknown")
    tally.add("declines", "duplicate", 2)
    assert value("declines_total", reason="unknown") == 1
    assert value("declines_total", reason="duplicate") == 2


def test_what_is_held_is_shown_as_it_is_now(tally, value):
    tally.held(4096, 2, 1)
    tally.held(8192, 3, 0)
    assert value("held_bytes") == 8192
    assert value("waiting_offers") == 3
    assert value("quarantined_blocks") == 0


def test_waits_are_spread_over_buckets(tally, value):
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


def test_every_event_that_the_channel_counts_is_known_with_its_kind():
    """A name that is not would be an exception in the receiver's thread."""
    found = set()
    for path in (Path(sglang_epd.__file__).parent / "transfer").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("tally.add"):
                name, *kind = map(ast.unparse, node.args)
                found.add(ast.literal_eval(name))
                assert bool(kind) == bool(COUNTERS[ast.literal_eval(name)][0]), ast.unparse(node)
    assert found == set(COUNTERS)


def test_the_servers_metrics_page_shows_what_a_scheduler_counted(tmp_path):
    """Each of SGLang's processes writes files, which the page adds up while they live."""
    code = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "from sglang_epd.observability.receiver import PrometheusTally\n"
        "tally = PrometheusTally()\n"
        "tally.add('payloads', 'shared')\n"
        "tally.held(4096, 1, 0)\n"
        "page = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(page)\n"
        "print(generate_latest(page).decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    assert f'{PREFIX}payloads_total{{landing="shared"}} 1.0' in done.stdout
    assert f"{PREFIX}held_bytes 4096.0" in done.stdout
