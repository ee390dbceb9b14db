"""Sounds: the same answer as one colocated server, and a 4xx for what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

import clips
from integration.client import Client, audio_part, data_url, text_part, user
from integration.hearing import Listener
from integration.topology import Machine, Topology

MODEL = "tiny-qwen2-audio"
TOLERANCE = 1e-3
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
    return Client(machine.use(name).urls[entry])


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_one_servers(machine: Machine, client: Client, case: str) -> None:
    expected = machine.reference(MODEL, CASES[case], TOKENS)
    actual = client.generation(*CASES[case], tokens=TOKENS)
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.tokens == expected.tokens
    assert actual.distance(expected) < TOLERANCE


@pytest.fixture(scope="module")
def listener() -> Listener:
    return Listener(MODEL)


@pytest.mark.parametrize("case", SEVERAL)
def test_log_probabilities_equal_the_models(client: Client, listener: Listener, case: str) -> None:
    parts = [audio_part(clips.audio(name, seconds=seconds)) for name, seconds in SEVERAL[case]]
    # As the samples are in a file of 16 bits.
    heard = [clips.samples(clips.audio(name, seconds=seconds)) for name, seconds in SEVERAL[case]]
    expected = listener.generation(heard, QUESTION["text"], TOKENS)
    messages = [user(*parts, QUESTION)]
    actual = client.generation(*messages, tokens=TOKENS)
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.tokens == expected.tokens
    assert actual.distance(expected) < TOLERANCE


def test_the_answer_depends_on_the_sound(topology: Topology) -> None:
    """Else parity would prove nothing."""
    server = Client(topology.urls["language"])
    tops = [
        server.generation(user(audio_part(clips.audio(name)), text_part("What?")), tokens=1).top[0]
        for name in ("low", "high")
    ]
    shared = tops[0].keys() & tops[1].keys()
    assert not shared or max(abs(tops[0][t] - tops[1][t]) for t in shared) > 100 * TOLERANCE


BAD = {
    "text": (b"This is a text.", 400, "not an audio file"),
    "head of a file": (clips.audio(container="FLAC")[:40], 400, "damaged"),
    "no sound": (clips.audio()[:44], 400, "no sound"),
    "too long": (clips.audio(container="FLAC", seconds=601.0), 413, "longer than 600 s"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_clip_is_a_4xx_that_names_it(topology: Topology, kind: str) -> None:
    bad, status, reason = BAD[kind]
    language = Client(topology.urls["language"])
    response = language.chat(user(audio_part(clips.audio()), audio_part(bad), text_part("What?")))
    assert response.status_code == status, response.text
    assert "audio 2 of 2" in response.json()["message"]
    assert reason in response.json()["message"]
    assert language.answer(ONE)
    topology.check_alive()


def test_placeholders_and_clips_must_match(topology: Topology) -> None:
    response = Client(topology.urls["language"]).generate(
        text="<|audio_bos|><|AUDIO|><|audio_eos|>" * 2,
        audio_data=[data_url(clips.audio(), "audio/wav")],
        sampling_params={"max_new_tokens": 4, "temperature": 0},
    )
    assert response.status_code == 400
    assert "2 audio placeholders for 1 audio items" in response.text


def test_a_modality_that_the_model_does_not_take_is_told(topology: Topology) -> None:
    response = Client(topology.urls["language"]).generate(
        text="What?",
        video_data=[data_url(clips.video(frames=4), "video/mp4")],
        sampling_params={"max_new_tokens": 4, "temperature": 0},
    )
    assert response.status_code == 415
    assert "video 1 of 1: this encoder does not take video input" in response.text
