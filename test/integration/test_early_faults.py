"""A prompt is prefilled in parts, and something goes wrong before its last picture has landed."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from integration.client import text_part, until, user
from integration.counters import held, status
from integration.late import Late, question
from integration.listener import Site
from integration.topology import Machine, Topology

# Three starts of servers, and requests that wait for frozen ones.
pytestmark = pytest.mark.extended

TOKENS = 8
ENCODERS = ("encoder", "encoder@2")
# Of requests at a time whose prompts do not fit into the KV cache together.
CROWD = 4


@pytest.fixture(scope="module")
def started(machine: Machine) -> Topology:
    return machine.use("early")


@pytest.fixture
def topology(started: Topology) -> Iterator[Topology]:
    """With both encoders up; nothing is held at the end."""
    started.start_again(*ENCODERS)
    yield started
    for name in ("language", "language@kv", "language@stages"):
        check_nothing_held(started.urls[name])


def check_nothing_held(url: str) -> None:
    """Nor later than SGLang says so: an idle scheduler counts its KV twice a minute."""
    seen: dict[str, float] = {}

    def idle() -> bool:
        seen.update(held(url))
        return not any(seen.values())

    try:
        until(idle)
    except AssertionError:
        pytest.fail(f"held by an idle server: {seen}")


def last_encoder(topology: Topology) -> str:
    """The one that has the late picture, and nothing else by then."""
    (name,) = [one for one in ENCODERS if status(topology, one)["items"]]
    return name


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_late_picture_is_encoded_elsewhere(
    machine: Machine, topology: Topology, site: Site, asked: list[dict[str, Any]], fault: int
) -> None:
    expected = machine.reference(topology.model, asked, TOKENS)
    late = Late(topology.urls["language"], site, asked)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().generation, *late.messages, tokens=TOKENS)
        late.wait()
        victim = topology.servers[last_encoder(topology)]
        if fault == signal.SIGKILL:
            victim.kill()
        else:
            os.killpg(victim.pid, fault)
        try:
            until(lambda: len(site.asked) > 1, why="the other encoder is not asked")
            assert not answer.done()
            site.released.set()
            answer.result().check(expected)
        finally:
            if fault == signal.SIGSTOP:
                os.killpg(victim.pid, signal.SIGCONT)
    assert late.tokens == late.done, "nothing was prefilled early twice"
    assert late.counted("failed") == 0


def test_a_client_leaves(
    machine: Machine, topology: Topology, site: Site, asked: list[dict[str, Any]]
) -> None:
    late = Late(topology.urls["language"], site, asked)
    place = urlsplit(late.url)
    client = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    body = {"model": "default", "messages": late.messages, "max_tokens": TOKENS}
    headers = {"Content-Type": "application/json"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    late.wait()
    client.close()
    # The picture is still on its way to an encoder: it is not waited for.
    check_nothing_held(late.url)
    assert not site.released.is_set()
    site.released.set()
    machine.check(topology.client(), topology.model, asked, TOKENS)


@pytest.mark.parametrize("entry", ["language@kv", "language@stages"])
def test_prompts_in_parts_do_not_fit_into_the_kv_cache_together(
    machine: Machine, topology: Topology, site: Site, photographs: list[Image.Image], entry: str
) -> None:
    """Each has room alone; parts of one evict those of another, and make room for an answer."""
    asked = [question(f"crowd {entry} {number}", photographs) for number in range(CROWD)]
    expected = [machine.reference(topology.model, one, TOKENS) for one in asked]
    client = topology.client(entry)
    lates = [Late(client.url, site, one) for one in asked]
    with ThreadPoolExecutor(CROWD + 1) as pool:
        answers = [pool.submit(client.generation, *one.messages, tokens=TOKENS) for one in lates]
        until(lambda: len(set(site.asked)) == CROWD, why="not all are on their way")
        lates[0].wait()
        other = pool.submit(client.answer, user(text_part("Say much.")), max_tokens=300)
        assert other.result()
        site.released.set()
        for answer, one in zip(answers, expected, strict=True):
            answer.result().check(one)
    assert sum(one.prompt_tokens for one in expected) > 512, "all had room"
