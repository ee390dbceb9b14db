"""Videos of models outside SGLang's list: a 4xx for what is wrong with one, and no answer from
what is kept of another."""

from __future__ import annotations

from typing import Any

import pytest

import clips
import photographs
from checkpoints.families import FAMILIES
from checkpoints.family import VIDEO, Family
from integration.client import Client, data_url, image_part, text_part, user, video_part
from integration.topology import Machine, Topology
from sglang_epd.families import IN_TREE

pytestmark = pytest.mark.extended

TOLERANCE = 1e-3
ADAPTED = [
    family
    for family in FAMILIES.values()
    if VIDEO in family.marks and family.architecture not in IN_TREE and not family.stopped
]
LOOKED_AT = text_part("What happens?")


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, id=f"{family.name}-zmq_to_scheduler") for family in ADAPTED],
)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def topology(machine: Machine, family: Family) -> Topology:
    return machine.use(family.name)


BAD = {
    "truncated": (400, "truncated", lambda: clips.video()[:4000]),
    "garbled": (400, "damaged", lambda: _garbled(clips.video())),
    "text": (400, "not a video", lambda: b"This is a text."),
    "playlist": (400, "names other files", lambda: b"#EXTM3U\nfile:///etc/passwd\n"),
    "too many frames": (413, "limit 18000", lambda: clips.encode(clips.still(32, 32, 20_000), 30)),
    "frames too large": (413, "4400 x 2304 px", lambda: clips.encode(clips.still(4400, 2304, 2))),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_video_is_a_4xx_that_names_it(topology: Topology, kind: str) -> None:
    status, reason, make = BAD[kind]
    language = Client(topology.urls["language"])
    good = video_part(clips.video())
    response = language.chat(user(good, video_part(make()), LOOKED_AT))
    assert response.status_code == status, response.text
    assert "video 2 of 2" in response.json()["message"]
    assert reason in response.json()["message"]
    assert language.answer(user(good, LOOKED_AT))
    topology.check_alive()


def test_a_video_that_is_not_there_is_a_4xx(topology: Topology) -> None:
    part = {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/film.mp4"}}
    response = Client(topology.urls["language"]).chat(user(part, LOOKED_AT))
    assert 400 <= response.status_code < 500, response.text
    assert "video 1 of 1" in response.json()["message"]


def test_options_that_an_encoder_cannot_follow_are_refused(topology: Topology) -> None:
    part = video_part(clips.video())
    part["video_url"]["fps"] = 1.0
    response = Client(topology.urls["language"]).chat(user(part, LOOKED_AT))
    assert response.status_code == 400
    assert "takes no options for its media: fps" in response.text


def test_a_video_is_not_taken_for_another_of_the_same_frames(
    machine: Machine, topology: Topology, family: Family
) -> None:
    """Equal frames at another rate, or in another order; the first comes again."""
    frames = clips.moving_crop("coffee", frames=16)
    videos = [
        clips.encode(frames, 8.0),
        clips.encode(frames, 4.0),
        clips.encode(frames.flip(0).contiguous(), 8.0),
    ]
    for video in (*videos, videos[0]):
        messages = [user(video_part(video), LOOKED_AT)]
        expected = machine.reference(family.specs[0].name, messages, 4, at=family.name)
        actual = Client(topology.urls["language"]).generation(*messages, tokens=4)
        assert actual.prompt_tokens == expected.prompt_tokens
        assert actual.distance(expected) < TOLERANCE


def test_a_video_before_an_image_has_its_own_place_in_the_prefix_cache(
    topology: Topology, family: Family
) -> None:
    """One server, whose items are in another order, is no measure here."""
    language = Client(topology.urls["language"])
    photo = data_url(photographs.load("cat").resize((140, 112)))
    text = f"First {family.marks['video']} then {family.marks['image']} {{}}"

    def answer(name: str) -> Any:
        response = language.generate(
            text=text.format("what?"),
            image_data=[photo],
            video_data=[data_url(clips.video(name), "video/mp4")],
            sampling_params={"max_new_tokens": 4, "temperature": 0},
            return_logprob=True,
        )
        assert response.status_code == 200, response.text
        tokens = response.json()["meta_info"]["output_token_logprobs"]
        return [token for _, token, _ in tokens], [logprob for logprob, _, _ in tokens]

    _flush(language)
    alone = answer("rocket")
    _flush(language)
    assert answer("coffee") != alone
    again = answer("rocket")
    assert again[0] == alone[0]
    assert again[1] == pytest.approx(alone[1], abs=TOLERANCE)


def test_pictures_and_videos_of_two_turns(
    machine: Machine, topology: Topology, family: Family
) -> None:
    """The second turn finds what the first has left."""
    first = [user(image_part(data_url(photographs.load("cat").resize((140, 112)))), LOOKED_AT)]
    second = [
        *first,
        {"role": "assistant", "content": "A cup."},
        user(text_part("And this"), video_part(clips.video("rocket")), text_part("beside it?")),
    ]
    for messages in (first, second, second):
        expected = machine.reference(family.specs[0].name, messages, 4, at=family.name)
        actual = Client(topology.urls["language"]).generation(*messages, tokens=4)
        assert actual.prompt_tokens == expected.prompt_tokens
        assert actual.distance(expected) < TOLERANCE


def test_a_prompt_that_takes_the_room_of_frames_is_refused(
    topology: Topology, family: Family
) -> None:
    if family.name != "internvl_chat":
        pytest.skip("its frames depend on the video alone")
    language = Client(topology.urls["language"])
    part = video_part(clips.video())
    response = language.chat(user(*[part] * 18, LOOKED_AT))
    assert response.status_code == 400
    assert "frames of each of its videos" in response.text


def _garbled(video: bytes) -> bytes:
    half = len(video) // 2
    return video[:600] + bytes(half) + video[600 + half :]


def _flush(server: Client) -> None:
    response = server.post("/flush_cache", {})
    assert response.status_code == 200, response.text
