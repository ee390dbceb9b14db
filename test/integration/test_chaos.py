"""Two small encoders under load: too much of it, and one of them frozen, killed, told to go.

Whatever happens to an encoder, each request is answered, as it is in peace.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from PIL import Image

from integration.client import (
    TOLERANCE,
    Client,
    Generation,
    about_a_crop,
    until,
)
from integration.counters import status, total, wait_until_used
from integration.topology import Machine, Topology

BURST = 100
# A load with a fault: so many requests before it, one each so often, and many at once with it.
STEADY, EVERY_S, AT_ONCE = 30, 0.05, 50
TOKENS = 4
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


@pytest.fixture(scope="module")
def started(machine: Machine, photographs: list[Image.Image]) -> Case:
    topology = machine.use("chaos")
    language = topology.client()
    messages = [about_a_crop(photographs, number) for number in range(BURST)]
    with ThreadPoolExecutor(4) as pool:  # no more than encoders take
        expected = list(pool.map(lambda one: language.generation(one, tokens=TOKENS), messages))
    return Case(topology, language, messages, expected)


@pytest.fixture
def case(started: Case) -> Case:
    """With both encoders up."""
    started.topology.start_again(*ENCODERS)
    return started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(BURST) as pool:
        yield pool


def _begin_load(case: Case, pool: ThreadPoolExecutor, victim: str) -> list[Future[float]]:
    """Requests in work on both encoders; returns as soon as the victim has some."""
    asked = _go_on(case, pool)
    end = time.monotonic() + SOON_S
    while True:
        asked += [pool.submit(case.ask, STEADY + number) for number in range(AT_ONCE)]
        while not all(one.done() for one in asked):
            if status(case.topology, victim)["items"]:
                return asked
        # On a busy machine all are answered between two looks.
        assert time.monotonic() < end, f"{victim} gets no work"


def _go_on(case: Case, pool: ThreadPoolExecutor) -> list[Future[float]]:
    """One request after the other, as before and after a fault."""
    asked = []
    for number in range(STEADY):
        asked.append(pool.submit(case.ask, number))
        time.sleep(EVERY_S)
    return asked


def _check(asked: list[Future[float]]) -> None:
    """All were answered, and as in peace."""
    end = time.monotonic() + SOON_S
    distances = [one.result(max(0.0, end - time.monotonic())) for one in asked]
    assert max(distances) < TOLERANCE


def _wait_until_used(case: Case, name: str) -> None:
    numbers = itertools.count()
    wait_until_used(case.topology, name, lambda: case.ask(next(numbers)) < TOLERANCE, SOON_S)


def _refused(case: Case) -> float:
    """Requests that encoders have refused for being full."""
    name, kind = "encoder_refusals_total", "OverloadedError"
    return sum(total(case.topology.urls[one], name, code=kind) for one in ENCODERS)


def test_more_than_the_encoders_take_is_answered_all_the_same(
    case: Case, pool: ThreadPoolExecutor
) -> None:
    before = _refused(case)
    asked = [pool.submit(case.ask, number) for number in range(BURST)]
    _check(asked)
    # Otherwise this has shown nothing.
    assert _refused(case) > before


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
    case.topology.start_again("encoder")
    _wait_until_used(case, "encoder")


def test_an_encoder_that_is_told_to_go_finishes_and_costs_nothing(
    case: Case, pool: ThreadPoolExecutor
) -> None:
    server = case.topology.servers["encoder@2"]
    asked = _begin_load(case, pool, "encoder@2")
    os.kill(server.pid, signal.SIGTERM)
    _check([*asked, *_go_on(case, pool)])
    until(lambda: not server.running, SOON_S, "told to go, it stays")
    _, drains, then = case.topology.log("encoder@2").partition("Draining: ")
    assert drains
    assert "given up" not in then
    assert case.ask(0) < TOLERANCE
