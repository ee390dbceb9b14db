"""What servers say that they have done."""

from __future__ import annotations

import re
import time

import requests

from integration.topology import Topology


def counted(url: str, name: str, label: str) -> dict[str, float]:
    """A counter of a server's /metrics, by the values of one of its labels."""
    text = requests.get(f"{url}/metrics", timeout=20).text
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^{name}_total(?:{{(.*)}})? (\S+)$", text, re.MULTILINE):
        kind = re.search(rf'{label}="([^"]*)"', labels) if label else None
        key = kind.group(1) if kind else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


def answered(topology: Topology) -> int:
    """Requests that an encoder has answered, when it has no other."""
    end = time.monotonic() + 60
    while True:
        status = requests.get(f"{topology.urls['encoder']}/v1/status", timeout=20).json()
        if not status["requests"]:
            break
        assert time.monotonic() < end, status
        time.sleep(0.05)
    # It counts, and then it says so to who has asked.
    time.sleep(0.3)
    return int(status["finished"])
