"""Sounds: the same answer as one colocated server, and a 4xx for what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

import clips
from integration.client import TOLERANCE, Client, audio_part, text_part, user
from integration.hearing import Listener
from integration.topology import Machine, Topology

MODEL = "tiny-qwen2-audio"
TOKENS = 16

QUESTION = text_part("What is this?")
ONE = user(audio_part(clips.audio("low")), QUESTION)
CASES: dict[str, list[dict[str, Any]]] = {
    "one": [ONE],
    "another rate": [user(audio_part(clips.audio(rate_hz=44_100)), QUESTION)],
    "mp3": [user(audio_part(clips.audio(container="MP3", rate_hz=44_100), "audio/mpeg"))],
    # More than the tower hears.
    "long": [user(audio_part(clips.audio(seconds=33.0)), QUESTION)],
}
# Names and seconds of clips side by side, of which one server cannot be asked.
SEVERAL = {
    "one": [("low", 2.0)],
    "two": [("low", 2.0), ("high", 3.5)],
    "the same twice": [("middle", 2.0), ("middle", 2.0)],
    "four": [("low", 1.0), ("high", 1.0), ("low", 1.0), ("shrill", 5.0)],
}


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("audio")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("audio", "language"), id="E+PD"),
        pytest.param(("audio_apart", "router"), id="E+P+D", marks=pytest.mark.extended),
    ],
)
def client(machine: Machine, request: pytest.FixtureRequest) -> Client:
    name, entry = request.param
    return machine.use(name).client(entry)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_one_servers(machine: Machine, client: Client, case: str) -> None:
    machine.check(client, MODEL, CASES[case], TOKENS)


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(MODEL)


@pytest.mark.parametrize("case", SEVERAL)
def test_log_probabilities_equal_the_models(client: Client, listener: Listener, case: str) -> None:
    sounds = [clips.audio(name, seconds=seconds) for name, seconds in SEVERAL[case]]
    # As the samples are in a file of 16 bits.
    heard = [clips.samples(sound) for sound in sounds]
    expected = listener.generation(heard, QUESTION["text"], TOKENS)
    client.generation(user(*map(audio_part, sounds), QUESTION), tokens=TOKENS).check(expected)


def test_the_answer_depends_on_the_sound(topology: Topology) -> None:
    """Else parity would prove nothing."""
    first, second = (
        topology.client().generation(user(audio_part(clips.audio(name)), QUESTION), tokens=1)
        for name in ("low", "high")
    )
    assert first.change(second) > 100 * TOLERANCE


BAD = {
    "text": (b"This is a text.", 400, "not an audio file"),
    "head of a file": (clips.audio(container="FLAC")[:40], 400, "damaged"),
    "no sound": (clips.audio()[:44], 400, "no sound"),
    "too long": (clips.audio(container="FLAC", seconds=601.0), 413, "longer than 600 s"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_clip_is_a_4xx_that_names_it(topology: Topology, kind: str) -> None:
    bad, status, reason = BAD[kind]
    language = topology.client()
    response = language.chat(user(audio_part(clips.audio()), audio_part(bad), text_part("What?")))
    assert response.status_code == status, response.text
    assert "audio 2 of 2" in response.json()["message"]
    assert reason in response.json()["message"]
    assert language.answer(ONE)
    topology.check_alive()
