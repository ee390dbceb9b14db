"""Servers that encode themselves and name pictures by their content: nothing that is kept is
taken for something else, and what is the same is known again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.test_forms import IMAGE
from integration.test_reuse import TOKENS, Server, conversation
from integration.topology import Machine, Topology

Photographs = list[Image.Image]
Messages = list[dict[str, Any]]

_MODEL = "tiny-qwen3-vl"

pytestmark = pytest.mark.extended


def equal_blocks() -> list[Messages]:
    """A picture of twelve blocks in a row, and one of the same in a column."""
    side = 32
    row, column = Image.new("RGB", (12 * side, side)), Image.new("RGB", (side, 12 * side))
    for number in range(12):
        block = Image.new("RGB", (side, side), (20 * number, 255 - 20 * number, 128))
        row.paste(block, (number * side, 0))
        column.paste(block, (0, number * side))
    return [
        [user(image_part(data_url(picture)), text_part("What is it?"))] for picture in (row, column)
    ]


@pytest.fixture(scope="module")
def expected(machine: Machine) -> Callable[[Messages], Any]:
    return lambda messages: machine.reference(_MODEL, messages, TOKENS)


@pytest.fixture(scope="module")
def topology(
    machine: Machine, photographs: Photographs, expected: Callable[[Messages], Any]
) -> Topology:
    for messages in (*equal_blocks(), *(conversation(photographs, turns) for turns in (1, 2, 3))):
        expected(messages)
    return machine.use("content")


# One server that does all, and a language server that sends only what has four pictures.
@pytest.fixture(params=["caching", "language"])
def server(
    topology: Topology, expected: Callable[[Messages], Any], request: pytest.FixtureRequest
) -> Server:
    return Server(topology, request.param, expected)


def test_pictures_of_equal_blocks_are_two(server: Server) -> None:
    for which in (0, 1, 0, 1):
        server.check(equal_blocks()[which])


def test_a_conversation_finds_its_pictures_again(server: Server, photographs: Photographs) -> None:
    for turns in (1, 2, 3):
        server.check(conversation(photographs, turns))
    usage = server.client.chat(*conversation(photographs, 3)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]


def test_it_is_one_picture_whoever_encodes_it(topology: Topology, photographs: Photographs) -> None:
    """Encoded here, then with three others by the encoder: the prefix is the same."""
    client = Client(topology.urls["language"])
    pictures = [data_url(photographs[0].rotate(angle)) for angle in (40, 50, 60, 70)]
    told = []
    for count in (1, 4):
        body = {"text": f"{IMAGE * count}What is it?", "image_data": pictures[:count]}
        answer = client.generate(**body, sampling_params={"max_new_tokens": 2}).json()
        told.append(answer["meta_info"])
    here, there = told
    assert "media_sources" not in here
    assert sum(there["media_sources"].values()) == 4
    assert here["cached_tokens"] < 0.1 * here["prompt_tokens"]
    assert there["cached_tokens"] > 0.9 * here["prompt_tokens"]
