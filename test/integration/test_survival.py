"""Two encoders behind a token, one of them registered: they die, freeze and come back.

The language server has two tokenizer workers; it and they are ended and come back too.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import requests

from integration.client import TOLERANCE, text_part, until, user
from integration.counters import wait_until_used
from integration.fork_server import BREAKS
from integration.listener import Site
from integration.topology import START_TIMEOUT_S, TOKEN, Machine, Topology
from sglang_epd.cli.processes import ServerError


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("two_encoders")


def _wait_until_used(topology: Topology, name: str, message: dict) -> None:
    wait_until_used(topology, name, lambda: topology.client().chat(message).status_code)


def test_an_encoder_that_registers_itself_gets_its_share(topology: Topology, message: dict) -> None:
    for name in ("encoder", "registering"):
        _wait_until_used(topology, name, message)


def test_a_rogue_registration_gets_no_image(topology: Topology, message: dict, site: Site) -> None:
    registry = f"http://127.0.0.1:{topology.ports['language bootstrap']}"
    allowed = {"Authorization": f"Bearer {TOKEN}"}

    def register(namespace: str, headers: dict[str, str]) -> requests.Response:
        body = {"url": site.url, "namespace": namespace, "lease_s": 15}
        return requests.post(
            f"{registry}/register_encoder_url", json=body, headers=headers, timeout=20
        )

    for headers in ({}, {"Authorization": "Bearer something else"}):
        assert register("theirs", headers).status_code == 401
    # The token alone does not do: an encoder of another model's revision.
    refused = register("theirs", allowed)
    assert refused.status_code == 409
    listed = requests.get(f"{registry}/list_encoder_urls", headers=allowed, timeout=20).json()
    status = requests.get(f"{topology.urls['encoder']}/v1/status", headers=allowed, timeout=20)
    ours = status.json()["namespace"]
    assert ours
    assert "theirs" in refused.text
    assert ours in refused.text
    assert set(listed["encoder_urls"]) == {topology.urls["encoder"], topology.urls["registering"]}
    for _ in range(4):
        topology.client().generation(message)
    assert not site.asked


@pytest.mark.extended  # an encoder starts twice more
def test_an_encoder_whose_device_breaks_ends_and_costs_no_request(
    topology: Topology, message: dict, tmp_path: Path
) -> None:
    language = topology.client()
    expected = language.generation(message)
    breaks = tmp_path / "now"
    topology.restart("registering", **{BREAKS: str(breaks)})
    _wait_until_used(topology, "registering", message)
    server = topology.servers["registering"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        breaks.touch()
        answers = [pool.submit(language.generation, message) for _ in range(20)]
        assert max(answer.result().distance(expected) for answer in answers) < TOLERANCE
    until(lambda: not server.running, 40, "an encoder that is of no use stays")
    with pytest.raises(ServerError, match="status 1"):
        server.check_running()
    assert "illegal memory access" in server.log_path.read_text()
    topology.restart("registering")
    _wait_until_used(topology, "registering", message)


def test_with_no_encoder_left_the_request_fails_and_the_server_lives(
    topology: Topology, message: dict
) -> None:
    language = topology.client()
    topology.servers["registering"].kill()
    topology.servers["encoder"].kill()
    response = language.chat(message)
    assert response.status_code == 503, response.text
    assert language.answer(user(text_part("Still there?")))
    topology.start_again("encoder", "registering")
    for name in ("encoder", "registering"):
        assert _decodes(topology, name), "its first picture waits for a process and its modules"
        _wait_until_used(topology, name, message)


def test_an_encoder_that_freezes_mid_request_is_let_go(topology: Topology, message: dict) -> None:
    """Both freeze, the client gives up; afterwards everything works again."""
    language = topology.client()
    pids = [topology.servers[name].pid for name in ("encoder", "registering")]
    expected = language.generation(message)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(language.generation, message) for _ in range(4)]
            time.sleep(1)
            assert language.answer(user(text_part("Not blocked?")))
            assert not any(one.done() for one in waiting)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert max(one.result().distance(expected) for one in waiting) < TOLERANCE
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_tokenizer_worker_that_dies_is_replaced(topology: Topology, message: dict) -> None:
    language = topology.client()
    expected = language.generation(message)
    before = tokenizer_workers(topology)
    before[0].kill()

    def replaced() -> bool:
        now = tokenizer_workers(topology)
        return before[0] not in now and len(now) == len(before)

    until(replaced, START_TIMEOUT_S, "one tokenizer worker is missing for good")
    for name in ("encoder", "registering"):
        _wait_until_used(topology, name, message)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: language.generation(message), range(16)))
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE


def test_a_language_server_started_again_finds_the_encoder_that_registers(
    topology: Topology, message: dict
) -> None:
    language = topology.client()
    expected = language.generation(message)
    topology.servers["encoder"].kill()
    topology.servers["language"].kill()
    topology.start_again("language")
    # An encoder renews its registration every 5 s, and a request waits as long for one.
    assert language.generation(message).distance(expected) < TOLERANCE


def tokenizer_workers(topology: Topology, role: str = "language") -> list[psutil.Process]:
    launcher = psutil.Process(topology.servers[role].pid)
    workers = []
    for child in launcher.children(recursive=True):
        # One that was killed stays a zombie, or goes, while we look.
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tokenizer_worker" in "".join(child.cmdline()):
                workers.append(child)
    return workers


def _decodes(topology: Topology, name: str) -> bool:
    """Whether an encoder has a process that decodes, beside the one that forks it."""
    processes = psutil.Process(topology.servers[name].pid).children(recursive=True)
    return sum("sglang_epd.decoding.child" in one.cmdline() for one in processes) > 1
