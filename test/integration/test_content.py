"""A language server that encodes few pictures itself and names them by their content: nothing
that is kept is taken for something else, and what is the same is known again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.client import data_url
from integration.test_forms import IMAGE
from integration.test_parity import Messages, Photographs, equal_blocks
from integration.test_reuse import TOKENS, Server, conversation
from integration.topology import Machine, Topology

_MODEL = "tiny-qwen3-vl"

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def expected(machine: Machine) -> Callable[[Messages], Any]:
    return lambda messages: machine.reference(_MODEL, messages, TOKENS)


@pytest.fixture(scope="module")
def topology(
    machine: Machine, photographs: Photographs, expected: Callable[[Messages], Any]
) -> Topology:
    for messages in (*equal_blocks(32), *(conversation(photographs, turns) for turns in (1, 2, 3))):
        expected(messages)
    return machine.use("content")


@pytest.fixture
def server(topology: Topology, expected: Callable[[Messages], Any]) -> Server:
    return Server(topology, "language", expected)


def test_pictures_of_equal_blocks_are_two(server: Server) -> None:
    for which in (0, 1, 0, 1):
        server.check(equal_blocks(32)[which])


def test_a_conversation_finds_its_pictures_again(server: Server, photographs: Photographs) -> None:
    for turns in (1, 2, 3):
        server.check(conversation(photographs, turns))
    usage = server.client.chat(*conversation(photographs, 3)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]


def test_it_is_one_picture_whoever_encodes_it(topology: Topology, photographs: Photographs) -> None:
    """Encoded here, then with three others by the encoder: the prefix is the same."""
    client = topology.client()
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
