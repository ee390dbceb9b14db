"""The same answer as one colocated server, to the log-probability."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.topology import Machine, Topology

TOLERANCE = 1e-3
TOKENS = 16
Photographs = list[Image.Image]


def one(photos: Photographs) -> list[dict[str, Any]]:
    return [user(image_part(data_url(photos[0])), text_part("What is in this picture?"))]


def two(photos: Photographs) -> list[dict[str, Any]]:
    first, second = (image_part(data_url(photo)) for photo in photos)
    return [user(text_part("First"), first, text_part("and second"), second, text_part("compare"))]


def five_of_mixed_sizes(photos: Photographs) -> list[dict[str, Any]]:
    sizes = [(28, 28), (336, 28), (28, 336), (448, 448), (1920, 1080)]
    parts = [
        image_part(data_url(photos[index % 2].resize(size))) for index, size in enumerate(sizes)
    ]
    return [user(*parts, text_part("What do these have in common?"))]


def side_by_side(photos: Photographs) -> list[dict[str, Any]]:
    parts = [image_part(data_url(photo.resize((224, 168)))) for photo in photos]
    return [user(*parts)]


def two_turns(photos: Photographs) -> list[dict[str, Any]]:
    first, second = (image_part(data_url(photo.resize((320, 224)))) for photo in photos)
    return [
        user(first, text_part("What is this?")),
        {"role": "assistant", "content": "A temple."},
        user(text_part("And this one"), second, text_part("beside it?")),
    ]


CASES = [one, two, five_of_mixed_sizes, side_by_side, two_turns]


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def topology(machine: Machine, request: pytest.FixtureRequest) -> Topology:
    return machine.use(request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("entry", ["language", "router"], ids=["E+PD", "E+P+D"])
def test_log_probabilities_equal_one_servers(
    machine: Machine, topology: Topology, photographs: Photographs, entry: str, case: Any
) -> None:
    messages = case(photographs)
    expected = machine.reference(topology.model, messages, TOKENS)
    actual = Client(topology.urls[entry]).generation(*messages, tokens=TOKENS)
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.tokens == expected.tokens
    assert len(actual.tokens) == TOKENS
    assert actual.distance(expected) < TOLERANCE


def test_the_answer_depends_on_the_image(topology: Topology, photographs: Photographs) -> None:
    """Else parity would prove nothing."""
    server = Client(topology.urls["language"])
    answers = [
        server.generation(user(image_part(data_url(photo)), text_part("What is it?")), tokens=1)
        for photo in photographs
    ]
    assert answers[0].prompt_tokens == answers[1].prompt_tokens
    shared = answers[0].top[0].keys() & answers[1].top[0].keys()
    gaps = [abs(answers[0].top[0][token] - answers[1].top[0][token]) for token in shared]
    # The two pictures may even share none of their 20 likeliest tokens.
    assert not gaps or max(gaps) > 100 * TOLERANCE
    assert answers[0].top != answers[1].top


def test_a_picture_is_not_taken_for_another_made_of_the_same_blocks(
    machine: Machine, topology: Topology
) -> None:
    """Equal patches in another grid: 12 blocks in a row and in a column."""
    block = 32 if topology.model.startswith("tiny-qwen3") else 28
    row = Image.new("RGB", (12 * block, block))
    column = Image.new("RGB", (block, 12 * block))
    for index in range(12):
        colour = Image.new("RGB", (block, block), (20 * index, 255 - 20 * index, 128))
        row.paste(colour, (index * block, 0))
        column.paste(colour, (0, index * block))
    for picture in (row, column, row):
        messages = [user(image_part(data_url(picture)), text_part("What is it?"))]
        expected = machine.reference(topology.model, messages, 4)
        actual = Client(topology.urls["language"]).generation(*messages, tokens=4)
        assert actual.distance(expected) < TOLERANCE
