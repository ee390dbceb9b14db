"""Servers on emulated accelerators: the answers of others, in the time that a profile says."""

from __future__ import annotations

import json
import time
from typing import Any

import psutil
import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.counters import total
from integration.topology import DILATION, Machine, Topology
from sglang_epd.platform.emulation import HEADER
from sglang_epd.profile import load_profile

PROFILE = load_profile("h100-qwen2_5-vl-7b")
TOKENS = 16
# Of each picture of 448 px.
PATCHES = 1024


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("emulated")


def processor_s(topology: Topology) -> float:
    """Processor time that the servers have used, of all of their processes."""
    roots = [psutil.Process(server.pid) for server in topology.servers.values()]
    every = [one for root in roots for one in (root, *root.children(recursive=True))]
    return sum(sum(one.cpu_times()[:2]) for one in every)


@pytest.mark.parametrize("entry", ["language", "caching"])
def test_answers_are_those_of_others_in_the_time_of_the_profile(
    machine: Machine, topology: Topology, photographs: list[Image.Image], entry: str
) -> None:
    pictures = [image_part(data_url(photo.resize((448, 448)))) for photo in photographs]
    messages: list[dict[str, Any]] = [user(*pictures, text_part(f"What does the {entry} see?"))]
    expected = machine.reference(topology.model, messages, TOKENS)
    server, encodes = topology.urls[entry], entry == "caching"
    tower = server if encodes else topology.urls["encoder"]
    before = total(tower, "emulated_seconds_total", kind="tower")
    began, used = time.monotonic(), processor_s(topology)
    actual = Client(server).generation(*messages, tokens=TOKENS)
    took, used = time.monotonic() - began, processor_s(topology) - used

    assert actual.tokens == expected.tokens
    assert actual.distance(expected) < 1e-3
    costs, context = PROFILE.language, actual.prompt_tokens
    tower_s = DILATION * PROFILE.encoder.tower.seconds([(PATCHES, 1)] * len(pictures))
    steps_s = DILATION * (TOKENS - 1) * costs.step_s(1, context)
    least_s = tower_s + DILATION * costs.prefill_s([(context, 0)]) + steps_s
    assert took >= least_s
    # Asleep meanwhile: others had the processor.
    assert used < 0.6 * least_s
    spent = total(tower, "emulated_seconds_total", kind="tower") - before
    assert spent >= tower_s * (1 - 1e-9)
    assert total(server, "emulated_seconds_total", kind="decode") >= steps_s


@pytest.mark.parametrize("entry", ["language", "caching"])
def test_servers_say_that_they_are_emulated_and_overlap_scheduling(
    topology: Topology, entry: str
) -> None:
    told = requests.get(f"{topology.urls[entry]}/server_info", timeout=20).json()
    mark = {"profile": PROFILE.name, "dilation": DILATION}
    assert [state["emulated"] for state in told["internal_states"]] == [mark]
    assert told["disable_overlap_schedule"] is False
    encoder = requests.get(f"{topology.urls['encoder']}/v1/info", timeout=20)
    assert encoder.json()["emulated"] == mark
    chat = Client(topology.urls[entry]).chat(user(text_part("Hello")), max_tokens=2, stream=True)
    assert [json.loads(one.headers[HEADER]) for one in (chat, encoder)] == [mark, mark]
