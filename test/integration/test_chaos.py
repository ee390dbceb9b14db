"""Two small encoders under load: too much of it, and one of them frozen, killed, told to go.

Whatever happens to an encoder, each request is answered, as it is in peace.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import requests
from PIL import Image

from integration.client import Client, Generation, data_url, image_part, text_part, user
from integration.topology import START_TIMEOUT_S, Machine, Topology

BURST = 200
# A load with a fault: so many requests before it, one each so often, and many at once with it.
STEADY, EVERY_S, AT_ONCE = 30, 0.05, 50
TOKENS = 4
# How far log-probabilities may be from those in peace.
SAME = 1e-3
# Whatever waits for what only a broken server would not do; requests may take 120 s.
SOON_S = 60.0

ENCODERS = ("encoder", "encoder@2")


@dataclass
class Case:
    """Servers, and what is asked of them."""

    topology: Topology
    language: Client
    # One picture each, no two the same.
    messages: list[dict]
    # What they are answered in peace.
    expected: list[Generation]

    def ask(self, number: int) -> float:
        """Ask for an answer; how far it is from that in peace."""
        number %= len(self.messages)
        answer = self.language.generation(self.messages[number], tokens=TOKENS)
        return answer.distance(self.expected[number])

    def delivered(self, name: str) -> int:
        """Items that an encoder has delivered since it started."""
        return self._count(name, "sglang:epd_encoder_items_total", 'outcome="delivered"')

    def refused(self, name: str) -> int:
        """Requests that an encoder has refused for being full since it started."""
        return self._count(name, "sglang:epd_encoder_refusals_total", 'code="OverloadedError"')

    def _count(self, name: str, metric: str, label: str) -> int:
        lines = requests.get(f"{self.topology.urls[name]}/metrics", timeout=10).text.splitlines()
        found = [line for line in lines if line.startswith(metric + "{") and label in line]
        return sum(int(float(line.rpartition(" ")[2])) for line in found)

    def in_work(self, name: str) -> int:
        status = requests.get(f"{self.topology.urls[name]}/v1/status", timeout=10).json()
        return int(status["items"])


@pytest.fixture(scope="module")
def started(machine: Machine, photographs: list[Image.Image]) -> Case:
    topology = machine.use("chaos")
    language = Client(topology.urls["language"])
    messages = [_message(photographs, number) for number in range(BURST)]
    with ThreadPoolExecutor(4) as pool:  # no more than encoders take
        expected = list(pool.map(lambda one: language.generation(one, tokens=TOKENS), messages))
    return Case(topology, language, messages, expected)


@pytest.fixture
def case(started: Case) -> Case:
    """With both encoders up."""
    fallen = [name for name in ENCODERS if not started.topology.servers[name].running]
    for name in fallen:
        started.topology.servers[name].start()
    for name in fallen:
        started.topology.servers[name].wait_ready(START_TIMEOUT_S)
    return started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(BURST) as pool:
        yield pool


def _message(photographs: list[Image.Image], number: int) -> dict:
    draw = random.Random(number)
    left, top = draw.randrange(0, 300), draw.randrange(0, 200)
    picture = photographs[number % 2].crop((left, top, left + 280, top + 196))
    return user(image_part(data_url(picture)), text_part(f"What is picture {number}?"))


def _begin_load(case: Case, pool: ThreadPoolExecutor, victim: str) -> list[Future[float]]:
    """Requests in work on both encoders; returns as soon as the victim has some."""
    asked = []
    for number in range(STEADY):
        asked.append(pool.submit(case.ask, number))
        time.sleep(EVERY_S)
    asked += [pool.submit(case.ask, STEADY + number) for number in range(AT_ONCE)]
    end = time.monotonic() + SOON_S
    while not case.in_work(victim):
        assert time.monotonic() < end, f"{victim} gets no work"
    return asked


def _go_on(case: Case, pool: ThreadPoolExecutor) -> list[Future[float]]:
    """Requests after a fault."""
    asked = []
    for number in range(STEADY):
        asked.append(pool.submit(case.ask, number))
        time.sleep(EVERY_S)
    return asked


def _check(asked: list[Future[float]]) -> None:
    """All were answered, and as in peace."""
    end = time.monotonic() + SOON_S
    distances = [one.result(max(0.0, end - time.monotonic())) for one in asked]
    assert max(distances) < SAME


def _wait_until_used(case: Case, name: str) -> None:
    before, end, number = case.delivered(name), time.monotonic() + SOON_S, 0
    while case.delivered(name) == before:
        assert time.monotonic() < end, f"{name} is up but not used"
        assert case.ask(number) < SAME
        number += 1


def test_more_than_the_encoders_take_is_answered_all_the_same(
    case: Case, pool: ThreadPoolExecutor
) -> None:
    before = sum(case.refused(name) for name in ENCODERS)
    asked = [pool.submit(case.ask, number) for number in range(BURST)]
    _check(asked)
    # Otherwise this has shown nothing.
    assert sum(case.refused(name) for name in ENCODERS) > before


def test_what_a_frozen_encoder_has_is_taken_elsewhere(case: Case, pool: ThreadPoolExecutor) -> None:
    pid = case.topology.servers["encoder@2"].pid
    asked = _begin_load(case, pool, "encoder@2")
    os.killpg(pid, signal.SIGSTOP)
    try:
        # It thaws only when all have been answered.
        _check([*asked, *_go_on(case, pool)])
    finally:
        os.killpg(pid, signal.SIGCONT)
    _wait_until_used(case, "encoder@2")


def test_a_killed_encoder_costs_nothing_and_is_used_again_when_it_is_back(
    case: Case, pool: ThreadPoolExecutor
) -> None:
    asked = _begin_load(case, pool, "encoder")
    case.topology.servers["encoder"].kill()
    _check([*asked, *_go_on(case, pool)])
    case.topology.servers["encoder"].start()
    case.topology.servers["encoder"].wait_ready(START_TIMEOUT_S)
    _wait_until_used(case, "encoder")


def test_an_encoder_that_is_told_to_go_finishes_and_costs_nothing(
    case: Case, pool: ThreadPoolExecutor
) -> None:
    server = case.topology.servers["encoder@2"]
    asked = _begin_load(case, pool, "encoder@2")
    os.kill(server.pid, signal.SIGTERM)
    _check([*asked, *_go_on(case, pool)])
    end = time.monotonic() + SOON_S
    while server.running:
        assert time.monotonic() < end, "told to go, it stays"
        time.sleep(0.1)
    assert case.ask(0) < SAME
