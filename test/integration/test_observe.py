"""scripts/observe on real servers: a trace that goes through all of them, and a Prometheus
that scrapes them and answers every query of the dashboard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from observing import prometheus

pytestmark = pytest.mark.extended
SCRIPT = Path(__file__).parents[2] / "scripts" / "observe.py"
LIMIT_S = 900


@pytest.mark.skipif(
    not prometheus.installed(), reason="prometheus and promtool are not in PATH (apt: prometheus)"
)
@pytest.mark.timeout(LIMIT_S + 60)
def test_everything_that_is_promised_is_seen(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    trace = (tmp_path / "trace.svg").read_text()
    for name in (
        *("epd_media", "epd_dispatch", "epd_encode", "epd_item", "epd_forward", "epd_deliver"),
        *("epd_wait_for_items", "epd_assemble", "prefill_forward"),
    ):
        assert f">{name}<" in trace, name
    assert trace.count(">epd_item<") == 2
    assert "language" in (tmp_path / "top.svg").read_text()
    assert "ready" in (tmp_path / "status.svg").read_text()
    assert "Where items came from" in (tmp_path / "prometheus.md").read_text()
