"""Encoders whose towers live in processes of their own: two towers, and one of two ranks."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from PIL import Image

from integration.client import TOLERANCE, until
from integration.counters import status, total
from integration.test_parity import CASES, TOKENS, two
from integration.topology import Machine, Topology

MODEL = "tiny-qwen2_5-vl"


@pytest.fixture(scope="module")
def topology(machine: Machine, photographs: list[Image.Image]) -> Topology:
    for case in CASES:  # all asked before the server that answers them is stopped
        machine.reference(MODEL, case(photographs), TOKENS)
    return machine.use("towers")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_log_probabilities_equal_one_servers(
    machine: Machine, topology: Topology, photographs: list[Image.Image], case
) -> None:
    messages = case(photographs)
    expected = machine.reference(MODEL, messages, TOKENS)
    language = topology.client()
    # Often enough that each encoder has each item.
    answers = [language.generation(*messages, tokens=TOKENS) for _ in range(3)]
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE


def test_every_tower_and_rank_is_profiled(topology: Topology, tmp_path: Path) -> None:
    wanted = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}
    for role, names in (
        ("encoder@replicas", {"encoder-dp0-rank0", "encoder-dp1-rank0"}),
        ("encoder@ranks", {"encoder-rank0", "encoder-rank1"}),
    ):
        for path in ("start_profile", "stop_profile"):
            answer = requests.post(f"{topology.urls[role]}/{path}", json=wanted, timeout=60)
            assert answer.status_code == 200, answer.text
        written = list(tmp_path.iterdir())
        assert {path.name.rpartition("-")[0] for path in written} == names
        for path in written:
            path.unlink()


def test_a_tower_that_is_killed_costs_no_request_and_comes_back(
    machine: Machine, topology: Topology, photographs: list[Image.Image]
) -> None:
    messages = two(photographs)
    expected = machine.reference(MODEL, messages, TOKENS)
    language = topology.client()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(language.generation, *messages) for _ in range(24)]
        for name in ("encoder@replicas", "encoder@ranks"):
            os.kill(workers(topology, name)[0].pid, signal.SIGKILL)
        # It has no other tower.
        until(lambda: health(topology, "encoder@ranks") == 503, 10)
        assert total(topology.urls["encoder@ranks"], "encoder_towers", state="lost") == 1
        assert health(topology, "encoder@replicas") == 200
        assert max(one.result().distance(expected) for one in answers) < TOLERANCE
    # Its ranks would come back as those of test_crew do, and take as long as two replicas.
    topology.servers["encoder@ranks"].kill()
    until(
        lambda: all(tower["alive"] for tower in status(topology, "encoder@replicas")["towers"]),
        *(180, "a tower is lost for good"),
    )
    assert len(workers(topology, "encoder@replicas")) == 2
    assert total(topology.urls["encoder@replicas"], "encoder_towers", state="alive") == 2
    assert health(topology, "encoder@replicas") == 200
    log = topology.log("language").splitlines()
    given_up = [line for line in log if "none of its towers works" in line]
    assert given_up
    assert all(topology.urls["encoder@ranks"] in line for line in given_up)
    answers_after = [language.generation(*messages) for _ in range(4)]
    assert max(answer.distance(expected) for answer in answers_after) < TOLERANCE


def test_workers_end_with_their_server(topology: Topology) -> None:
    """The last test of these servers."""
    found = workers(topology, "encoder@replicas")
    topology.servers["encoder@replicas"].kill()
    assert not psutil.wait_procs(found, timeout=10)[1]


def health(topology: Topology, name: str) -> int:
    return requests.get(f"{topology.urls[name]}/health", timeout=20).status_code


def workers(topology: Topology, name: str) -> list[psutil.Process]:
    front = psutil.Process(topology.servers[name].pid)
    return [
        child
        for child in front.children(recursive=True)
        if any("sglang_epd.encoder.workers.worker" in part for part in child.cmdline())
    ]
