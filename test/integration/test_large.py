"""A language server of several pipeline stages, or hosts, when other processes end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from PIL import Image

from integration.client import TOLERANCE, Client, about_a_crop, until
from integration.topology import TOPOLOGIES, Machine, Topology

pytestmark = pytest.mark.extended

Photographs = list[Image.Image]
# Longer than a request takes on a busy machine.
SOON_S = 90.0


@pytest.fixture(scope="module", params=["others-stages", "hosts-zmq_to_scheduler"])
def large(machine: Machine, request: pytest.FixtureRequest) -> tuple[Topology, Client]:
    name, _, role = request.param.partition("-")
    topology = machine.use(name)
    return topology, topology.client(f"language@{role}")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(pid, signal.SIGCONT)


def test_clients_that_leave_while_their_pictures_are_encoded(
    large: tuple[Topology, Client], photographs: Photographs
) -> None:
    topology, client = large
    expected = client.generation(about_a_crop(photographs, 0))
    with frozen(topology.servers["encoder"].pid):
        for number in range(100, 104):
            client.leaves(about_a_crop(photographs, number), after_s=0.5, max_tokens=8)
        # Requests go on beside them.
        assert client.generation(about_a_crop(photographs, 0)).distance(expected) < TOLERANCE
    for number in (0, 100, 104):
        client.generation(about_a_crop(photographs, number))
    topology.check_alive()


def test_a_killed_encoder_costs_only_the_requests_it_had(
    large: tuple[Topology, Client], photographs: Photographs
) -> None:
    topology, client = large
    encoder = topology.servers["encoder"]
    known = client.generation(about_a_crop(photographs, 0))
    asked = [about_a_crop(photographs, number) for number in range(200, 208)]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(client.chat, message) for message in asked]
        until(lambda: any(answer.done() for answer in answers), SOON_S)
        encoder.kill()
        statuses = [answer.result(SOON_S).status_code for answer in answers]
    assert set(statuses) <= {200, 502, 503, 504}
    assert client.generation(about_a_crop(photographs, 0)).distance(known) < TOLERANCE
    topology.start_again("encoder")
    until(lambda: client.chat(asked[-1]).ok, SOON_S, "the encoder is back but not used")
    again = [client.generation(message) for message in asked]
    assert client.generation(asked[0]).distance(again[0]) < TOLERANCE
    topology.check_alive()


def test_a_host_that_stands_still_holds_requests_up_and_loses_none(
    machine: Machine, photographs: Photographs
) -> None:
    """As where SGLang runs by itself: its ranks wait for each other."""
    hosts, name = machine.use("hosts"), "language@zmq_to_scheduler"
    client, message = hosts.client(name), about_a_crop(photographs, 300)
    with ThreadPoolExecutor(1) as pool:
        with frozen(hosts.servers[f"{name}#1"].pid):
            answer = pool.submit(client.generation, message)
            time.sleep(3.0)
            assert not answer.done()
        first = answer.result(SOON_S)
    assert client.generation(message).distance(first) < TOLERANCE
    hosts.check_alive()


def test_the_server_ends_with_its_other_host(machine: Machine, photographs: Photographs) -> None:
    hosts = TOPOLOGIES["hosts"]()
    hosts.roles = tuple(role for role in hosts.roles if "tokenizer" not in role)
    name = "language@zmq_to_scheduler"
    with machine.lend(hosts):
        client = hosts.client(name)
        client.answer(about_a_crop(photographs, 0))
        hosts.servers[f"{name}#1"].kill()
        with contextlib.suppress(requests.ConnectionError):
            answer = client.chat(about_a_crop(photographs, 1))
            assert answer.status_code >= 500, answer.text
        until(lambda: not hosts.servers[name].running, SOON_S, "it goes on without its host")
