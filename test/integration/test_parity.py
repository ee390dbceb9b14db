"""The same answer as one colocated server, to the log-probability."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from integration.client import TOLERANCE, data_url, image_part, text_part, user
from integration.topology import Machine, Topology

TOKENS = 16
Photographs = list[Image.Image]
Messages = list[dict[str, Any]]


def one(photos: Photographs) -> Messages:
    return [user(image_part(data_url(photos[0])), text_part("What is in this picture?"))]


def two(photos: Photographs) -> Messages:
    first, second = (image_part(data_url(photo)) for photo in photos)
    return [user(text_part("First"), first, text_part("and second"), second, text_part("compare"))]


def five_of_mixed_sizes(photos: Photographs) -> Messages:
    sizes = [(28, 28), (336, 28), (28, 336), (448, 448), (1920, 1080)]
    parts = [
        image_part(data_url(photos[index % 2].resize(size))) for index, size in enumerate(sizes)
    ]
    return [user(*parts, text_part("What do these have in common?"))]


def side_by_side(photos: Photographs) -> Messages:
    parts = [image_part(data_url(photo.resize((224, 168)))) for photo in photos]
    return [user(*parts)]


def two_turns(photos: Photographs) -> Messages:
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


def equal_blocks(side: int) -> list[Messages]:
    """A picture of twelve blocks in a row, and one of the same in a column."""
    row, column = Image.new("RGB", (12 * side, side)), Image.new("RGB", (side, 12 * side))
    for number in range(12):
        block = Image.new("RGB", (side, side), (20 * number, 255 - 20 * number, 128))
        row.paste(block, (number * side, 0))
        column.paste(block, (0, number * side))
    return [
        [user(image_part(data_url(picture)), text_part("What is it?"))] for picture in (row, column)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("entry", ["language", "router"], ids=["E+PD", "E+P+D"])
def test_log_probabilities_equal_one_servers(
    machine: Machine, topology: Topology, photographs: Photographs, entry: str, case: Any
) -> None:
    machine.check(topology.client(entry), topology.model, case(photographs), TOKENS)


def test_the_answer_depends_on_the_image(topology: Topology, photographs: Photographs) -> None:
    """Else parity would prove nothing."""
    first, second = (
        topology.client().generation(
            user(image_part(data_url(photo)), text_part("What is it?")), tokens=1
        )
        for photo in photographs
    )
    assert first.prompt_tokens == second.prompt_tokens
    assert first.change(second) > 100 * TOLERANCE


def test_a_picture_is_not_taken_for_another_made_of_the_same_blocks(
    machine: Machine, topology: Topology
) -> None:
    """Equal patches in another grid."""
    row, column = equal_blocks(32 if topology.model.startswith("tiny-qwen3") else 28)
    for messages in (row, column, row):
        machine.check(topology.client(), topology.model, messages, 4)
