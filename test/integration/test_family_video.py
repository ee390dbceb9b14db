"""Videos of models outside SGLang's list: no answer from what is kept of another."""

from __future__ import annotations

from typing import Any

import pytest

import clips
import photographs
from checkpoints.families import FAMILIES
from checkpoints.family import VIDEO, Family
from integration.client import (
    TOLERANCE,
    data_url,
    image_part,
    text_part,
    user,
    video_part,
)
from integration.topology import Machine, Topology
from sglang_epd.families import IN_TREE

pytestmark = pytest.mark.extended

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
        machine.check(topology.client(), family.specs[0].name, messages, 4, at=family.name)


def test_a_video_before_an_image_has_its_own_place_in_the_prefix_cache(
    topology: Topology, family: Family
) -> None:
    """One server, whose items are in another order, is no measure here."""
    language = topology.client()
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

    assert language.flush()
    alone = answer("rocket")
    assert language.flush()
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
        machine.check(topology.client(), family.specs[0].name, messages, 4, at=family.name)


def test_a_prompt_that_takes_the_room_of_frames_is_refused(
    topology: Topology, family: Family
) -> None:
    if family.name != "internvl_chat":
        pytest.skip("its frames depend on the video alone")
    language = topology.client()
    part = video_part(clips.video())
    response = language.chat(user(*[part] * 18, LOOKED_AT))
    assert response.status_code == 400
    assert "frames of each of its videos" in response.text
