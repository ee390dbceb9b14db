"""Every family that a checkpoint can be made of: the same answer as one colocated server.

`scripts/families` runs this file and writes what came out to docs/families.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import clips
import photographs
from checkpoints.families import FAMILIES
from checkpoints.family import AUDIO, IMAGE, VIDEO, Family
from integration.client import (
    TOLERANCE,
    Client,
    audio_part,
    data_url,
    image_part,
    text_part,
    user,
    video_part,
)
from integration.topology import Machine, checkpoint
from sglang_epd.cli.processes import ServerError

pytestmark = pytest.mark.extended

TOKENS = 16
# The server that receives with each, and the topology that has it.
BACKENDS = {
    "zmq_to_scheduler": ("{}", "language"),
    "zmq_to_tokenizer": ("{}, other backends", "language@zmq_to_tokenizer"),
    "mooncake": ("{}, other backends", "language@mooncake"),
}
Part = dict[str, Any]
Messages = list[dict[str, Any]]


def photo(name: str, width: int, height: int) -> Part:
    return image_part(data_url(photographs.load(name).resize((width, height))))


def coffee() -> Part:
    return photo("coffee", 448, 336)


def rocket() -> Part:
    return photo("rocket", 280, 392)


def film(name: str = "coffee") -> Part:
    return video_part(clips.video(name))


def sound(name: str = "low") -> Part:
    return audio_part(clips.audio(name))


QUESTION = text_part("What is this?")
# By modality: those that a family has to take for the case, and the case.
CASES: dict[str, tuple[set[str], Callable[[], Messages]]] = {
    "one image": ({IMAGE}, lambda: [user(coffee(), QUESTION)]),
    "text between images": (
        {IMAGE},
        lambda: [user(text_part("First"), coffee(), text_part("then"), rocket(), QUESTION)],
    ),
    "adjacent images": ({IMAGE}, lambda: [user(coffee(), rocket())]),
    "an image twice": ({IMAGE}, lambda: [user(coffee(), rocket(), coffee(), QUESTION)]),
    "images of two turns": (
        {IMAGE},
        lambda: [
            {"role": "system", "content": "Be brief."},
            user(rocket(), QUESTION),
            {"role": "assistant", "content": "A temple."},
            user(text_part("And this"), coffee(), text_part("beside it?")),
        ],
    ),
    "image of a tool": (
        {IMAGE},
        lambda: [
            user(text_part("Look for a picture.")),
            {"role": "assistant", "content": "I do."},
            {"role": "tool", "tool_call_id": "1", "content": [rocket(), text_part("found")]},
            user(QUESTION),
        ],
    ),
    "one video": ({VIDEO}, lambda: [user(film(), QUESTION)]),
    "a video twice": ({VIDEO}, lambda: [user(film(), text_part("and"), film(), QUESTION)]),
    "video and image": ({VIDEO, IMAGE}, lambda: [user(film(), rocket(), QUESTION)]),
    "one sound": ({AUDIO}, lambda: [user(sound(), QUESTION)]),
    "a sound twice": ({AUDIO}, lambda: [user(sound(), text_part("and"), sound(), QUESTION)]),
    "sound and image": ({AUDIO, IMAGE}, lambda: [user(rocket(), sound(), QUESTION)]),
    "all three": ({AUDIO, IMAGE, VIDEO}, lambda: [user(sound(), film(), rocket(), QUESTION)]),
}
# Two items of a modality, of equal layout.
PAIRS: dict[str, tuple[Callable[[], Part], Callable[[], Part]]] = {
    IMAGE: (coffee, lambda: photo("rocket", 448, 336)),
    VIDEO: (film, lambda: film("rocket")),
    AUDIO: (sound, lambda: sound("high")),
}
SERVED = [family for family in FAMILIES.values() if not family.stopped]
Record = Callable[[str, object], None]


def _cases() -> list[Any]:
    return [
        pytest.param(family, backend, case, id=f"{family.name}-{backend}-{case}")
        for family in SERVED
        for backend in BACKENDS
        for case, (needed, _) in CASES.items()
        if needed <= family.marks.keys()
    ]


@pytest.mark.parametrize(("family", "backend", "case"), _cases())
def test_log_probabilities_equal_one_servers(
    machine: Machine, record_property: Record, family: Family, backend: str, case: str
) -> None:
    record_property("family", family.name)
    record_property("backend", backend)
    record_property("case", case)
    if case in family.without:
        pytest.skip(family.without[case])
    messages = CASES[case][1]()
    expected = machine.reference(family.specs[0].name, messages, TOKENS, at=family.name)
    actual = _server(machine, family, backend).generation(*messages, tokens=TOKENS)
    assert actual.prompt_tokens == expected.prompt_tokens
    record_property("distance", actual.distance(expected))
    actual.check(expected)


@pytest.mark.parametrize(
    ("family", "modality"),
    [
        pytest.param(family, modality, id=f"{family.name}-zmq_to_scheduler-{modality}")
        for family in SERVED
        for modality in family.marks
    ],
)
def test_the_answer_depends_on_the_media(
    machine: Machine, record_property: Record, family: Family, modality: str
) -> None:
    """Else parity would prove nothing."""
    record_property("family", family.name)
    record_property("modality", modality)
    server = _server(machine, family, "zmq_to_scheduler")
    first, second = (
        server.generation(user(part(), QUESTION), tokens=1) for part in PAIRS[modality]
    )
    assert first.prompt_tokens == second.prompt_tokens
    change = first.change(second)
    record_property("change", change)
    assert change > 10 * TOLERANCE


@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f"{f.name}-zmq_to_scheduler-update") for f in SERVED]
)
def test_the_weights_are_updated_from_a_whole_checkpoint(machine: Machine, family: Family) -> None:
    """A language server has no place for its tower's."""
    messages = CASES["one image" if IMAGE in family.marks else "one sound"][1]()
    server = _server(machine, family, "zmq_to_scheduler")
    before = server.generation(*messages, tokens=4)
    model = {"model_path": checkpoint(family.specs[0].name)}
    answer = server.post("/update_weights_from_disk", model)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    server.generation(*messages, tokens=4).check(before)


@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f.name) for f in FAMILIES.values() if f.stopped]
)
def test_what_cannot_run_here_is_stopped_where_we_say(
    machine: Machine, record_property: Record, family: Family
) -> None:
    record_property("family", family.name)
    record_property("stopped", ": ".join(family.stopped))
    with pytest.raises(ServerError) as failure:
        machine.use(f"{family.name}, one server")
    for told in family.stopped:
        assert told in str(failure.value)


def _server(machine: Machine, family: Family, backend: str) -> Client:
    topology, role = BACKENDS[backend]
    return machine.use(topology.format(family.name)).client(role)
