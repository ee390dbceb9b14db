"""What servers say that they have done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from integration.client import until
from integration.topology import Topology

OURS = "sglang:epd_"


def samples(url: str, name: str, prefix: str = OURS) -> Iterator[tuple[dict[str, str], float]]:
    """The labels and values of a metric at a server's /metrics; `name` is without the prefix."""
    text = requests.get(f"{url}/metrics", timeout=20).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{prefix}{name}":
                yield sample.labels, sample.value


def total(url: str, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    return sum(value for has, value in samples(url, name) if labels.items() <= has.items())


def held(url: str) -> dict[str, float]:
    """What a language server holds: 0 of everything when it is idle and nothing has leaked."""
    ours = ("receiver_held_bytes", "receiver_waiting_offers", "receiver_quarantined_blocks")
    own = ("num_running_reqs", "num_queue_reqs", "kv_used_tokens")
    found = {name: total(url, name) for name in ours}
    for name in own:
        found[name] = sum(value for _, value in samples(url, name, "sglang:"))
    return found


def counted(url: str, name: str, label: str) -> Counter[str]:
    """The same by the values of one label; none of which nothing was counted yet."""
    found: Counter[str] = Counter()
    for labels, value in samples(url, name):
        found[labels[label]] += int(value)
    return +found


def status(topology: Topology, role: str = "encoder") -> dict[str, Any]:
    """An encoder's `/v1/status`, which needs no token."""
    found: dict[str, Any] = requests.get(f"{topology.urls[role]}/v1/status", timeout=20).json()
    return found


def wait_until_used(
    topology: Topology, role: str, ask: Callable[[], object], seconds: float = 60.0
) -> None:
    """Ask until an encoder has delivered an item.

    Args:
        ask: has one item encoded; its answer is to be true.
    """
    before = delivered(topology, role)

    def used() -> bool:
        assert ask()
        return delivered(topology, role) > before

    until(used, seconds, f"{role} is up but not used")


def delivered(topology: Topology, role: str = "encoder") -> int:
    """Items that an encoder has delivered since it started."""
    return int(total(topology.urls[role], "encoder_items_total", outcome="delivered"))


def answered(topology: Topology) -> int:
    """Requests that an encoder has answered, when it has no other."""
    until(lambda: not status(topology)["requests"])
    # It counts, and then it says so to who has asked.
    time.sleep(0.3)
    return int(status(topology)["finished"])
