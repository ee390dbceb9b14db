"""Videos: the same answer as one colocated server, and a 4xx for what is wrong with one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

import clips
from integration.client import TOLERANCE, data_url, image_part, text_part, user, video_part
from integration.topology import Machine, Topology

TOKENS = 16
Photographs = list[Image.Image]


@pytest.fixture(scope="session")
def coffee() -> bytes:
    """Three seconds at 8 frames a second, 224 x 168 px."""
    return clips.video("coffee")


@pytest.fixture(scope="session")
def rocket() -> bytes:
    """A second and a half at 25 frames a second, 320 x 192 px: fewer are read than there are."""
    return clips.video("rocket", frames=40, size=(320, 192), rate=25.0)


def one(coffee: bytes, _rocket: bytes, _photo: dict) -> list[dict[str, Any]]:
    return [user(video_part(coffee), text_part("What happens here?"))]


def webm(_coffee: bytes, _rocket: bytes, _photo: dict) -> list[dict[str, Any]]:
    part = video_part(clips.video("cat", frames=10, container="webm"), "video/webm")
    return [user(text_part("Look."), part, text_part("What happens here?"))]


def with_an_image(coffee: bytes, rocket: bytes, photo: dict) -> list[dict[str, Any]]:
    return [user(video_part(rocket), photo, video_part(coffee), text_part("Compare."))]


def the_same_twice(coffee: bytes, _rocket: bytes, _photo: dict) -> list[dict[str, Any]]:
    return [user(video_part(coffee), video_part(coffee), text_part("Is there a difference?"))]


def two_turns(coffee: bytes, rocket: bytes, _photo: dict) -> list[dict[str, Any]]:
    return [
        user(video_part(coffee), text_part("What is this?")),
        {"role": "assistant", "content": "A cup."},
        user(text_part("And this"), video_part(rocket), text_part("beside it?")),
    ]


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def topology(machine: Machine, request: pytest.FixtureRequest) -> Topology:
    return machine.use(request.param)


@pytest.mark.parametrize(
    "case", [one, webm, with_an_image, the_same_twice, two_turns], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("entry", ["language", "router"], ids=["E+PD", "E+P+D"])
def test_log_probabilities_equal_one_servers(
    machine: Machine,
    topology: Topology,
    coffee: bytes,
    rocket: bytes,
    photographs: Photographs,
    entry: str,
    case: Any,
) -> None:
    messages = case(coffee, rocket, image_part(data_url(photographs[0])))
    machine.check(topology.client(entry), topology.model, messages, TOKENS)


def test_the_answer_depends_on_the_order_of_frames(topology: Topology) -> None:
    """Else parity would prove nothing."""
    frames = clips.moving_crop("coffee", frames=16)
    first, second = (
        topology.client().generation(user(video_part(video), text_part("What?")), tokens=1)
        for video in (clips.encode(frames), clips.encode(frames.flip(0).contiguous()))
    )
    assert first.change(second) > 10 * TOLERANCE


def test_a_video_is_not_taken_for_another_of_the_same_frames(
    machine: Machine, topology: Topology
) -> None:
    """Equal patches at another time, or in another grid."""
    frames = clips.still(112, 224, 4)
    videos = [
        clips.encode(frames, 2.0),
        clips.encode(frames, 1.0),
        clips.encode(clips.still(224, 112, 4), 2.0),
    ]
    for video in (*videos, videos[0]):
        messages = [user(video_part(video), text_part("What is it?"))]
        machine.check(topology.client(), topology.model, messages, 4)


def _garbled(video: bytes) -> bytes:
    half = len(video) // 2
    return video[:600] + bytes(half) + video[600 + half :]


# What is wrong with a video is told before a family is asked.
BAD: dict[str, tuple[int, str, Callable[[bytes], bytes]]] = {
    "truncated": (400, "truncated", lambda good: good[: len(good) // 2]),
    "garbled": (400, "damaged", _garbled),
    "playlist": (400, "names other files", lambda _: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
    "one frame": (400, "too short", lambda _: clips.video(frames=1)),
    "too many frames": (
        *(413, "20000 frames, limit 18000"),
        lambda _: clips.encode(clips.still(32, 32, 20_000), 30.0),
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_video_is_a_4xx_that_names_it(qwen2_5: Topology, coffee: bytes, kind: str) -> None:
    status, reason, make = BAD[kind]
    language, bad = qwen2_5.client(), video_part(make(coffee))
    begin = time.monotonic()
    response = language.chat(user(video_part(coffee), bad, text_part("What?")))
    assert time.monotonic() - begin < 20.0
    assert response.status_code == status, response.text
    message = response.json()["message"]
    assert "video 2 of 2" in message
    assert reason in message
    assert language.answer(user(video_part(coffee), text_part("And this?")))
    qwen2_5.check_alive()


def test_a_modality_that_the_model_does_not_take_is_told(qwen2_5: Topology) -> None:
    response = qwen2_5.client().generate(
        text="What?",
        audio_data=[data_url(clips.audio(), "audio/wav")],
        sampling_params={"max_new_tokens": 4, "temperature": 0},
    )
    assert response.status_code == 415
    assert "audio 1 of 1: this encoder does not take audio input" in response.text


@pytest.mark.extended  # an encoder starts twice, as users start it
def test_an_encoder_with_other_settings_of_pixels_costs_a_request_and_no_server(
    qwen2_5: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer knows the video's layout from the encoder before it."""
    client, server = qwen2_5.client(), qwen2_5.servers["language"]
    frames = clips.moving_crop("coffee", frames=16, size=(640, 480))
    message = user(text_part("What moves?"), video_part(clips.encode(frames, 4.0)))
    before = client.generation(message)
    monkeypatch.setattr(qwen2_5, "forks", None)
    qwen2_5.restart("encoder", VIDEO_MAX_PIXELS="800000")
    assert client.flush()
    refused = client.chat(message)
    assert refused.status_code == 503, refused.text
    assert "do they have the same settings of pixels" in refused.text
    assert server.running
    assert client.generation(message).prompt_tokens < before.prompt_tokens
    qwen2_5.restart("encoder")
    assert client.flush()
    assert client.chat(message).status_code == 503
    client.generation(message).check(before)
    assert server.running
