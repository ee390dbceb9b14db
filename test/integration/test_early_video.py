"""A video's beginning is prefilled while its end is being encoded, and nothing of the answer shows
it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import clips
from integration.client import text_part, until, user, video_part
from integration.counters import delivered, held, status, total
from integration.topology import Machine, Topology

# Servers of their own, of which some are not forked, and passes that take a second.
pytestmark = pytest.mark.extended

TOKENS = 8
ENCODERS = ("encoder", "encoder@inline")


@pytest.fixture(scope="module", params=["long_videos", "long_videos_qwen2"])
def started(machine: Machine, request: pytest.FixtureRequest) -> Topology:
    return machine.use(request.param)


@pytest.fixture
def topology(started: Topology) -> Iterator[Topology]:
    """With both encoders up; nothing is held at the end."""
    started.start_again(*ENCODERS)
    yield started
    until(lambda: not any(held(started.urls["language"]).values()), why="something is held")


def asked(name: str) -> list[dict]:
    """A question about twenty steps of time, which no other test asks."""
    frames = clips.moving_crop("coffee", frames=40, size=(128, 128), step=1 + len(name) % 7)
    return [user(text_part(f"This is {name}."), video_part(clips.encode(frames, 2.0)))]


def early(topology: Topology) -> float:
    return total(topology.urls["language"], "early_tokens_total")


@pytest.mark.parametrize("way", ["one", "other"])
def test_the_answer_is_one_servers(machine: Machine, topology: Topology, way: str) -> None:
    """Encoders have their turns: one writes into shared memory, one sends frames."""
    messages = asked(f"the video of the {way}")
    expected = machine.reference(topology.model, messages, TOKENS)
    before = early(topology)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().generation, *messages, tokens=TOKENS)
        until(lambda: early(topology) > before + 60, 30.0, "nothing was prefilled early")
        assert not answer.done()
        answer.result().check(expected)
    assert total(topology.urls["language"], "early_parts_total", outcome="failed") == 0


def test_the_rest_is_encoded_elsewhere(machine: Machine, topology: Topology) -> None:
    messages = asked("a video of which an encoder dies")
    expected = machine.reference(topology.model, messages, TOKENS)
    before = early(topology)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().generation, *messages, tokens=TOKENS)
        (busy,) = until(lambda: [one for one in ENCODERS if status(topology, one)["items"]])
        (other,) = {*ENCODERS} - {busy}
        sent = delivered(topology, other)
        until(lambda: early(topology) > before + 60, 30.0, "nothing was prefilled early")
        topology.servers[busy].kill()
        assert not answer.done()
        answer.result().check(expected)
    assert delivered(topology, other) == sent + 1


def test_a_client_leaves(machine: Machine, topology: Topology) -> None:
    messages = asked("a video that nobody waits for")
    before = early(topology)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().chat, *messages, rid="an early video")
        until(lambda: early(topology) > before + 60, 30.0, "nothing was prefilled early")
        topology.client().post("/abort_request", {"rid": "an early video"})
        assert answer.result().status_code >= 400
    until(lambda: not any(held(topology.urls["language"]).values()), why="something is held")
    machine.check(topology.client(), topology.model, messages, TOKENS)
