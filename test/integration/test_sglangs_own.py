"""What SGLang's own test of EPD starts and asks, with what one server answers as the measure.

Its flags and its client (the package `openai`), on small random checkpoints. SGLang looks for words
in an answer; these tests compare it with one server's. Its Qwen3.5 is not served on a CPU, so
Qwen3-VL has its flags. Servers of its other classes are those of other files here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from PIL import Image

import clips
from integration.client import Client, data_url, image_part, text_part, user, video_part
from integration.counters import delivered
from integration.topology import Machine

pytestmark = pytest.mark.extended
Message = dict[str, Any]
Photographs = list[Image.Image]
TOKENS = 16


@dataclass(frozen=True)
class Own:
    """Servers of its tests.

    Attributes:
        entry: that its clients ask.
        reference: the checkpoint, or family, of one server that they are compared with.
        more: what a client says besides.
    """

    topology: str
    entry: str
    reference: str
    cases: tuple[Callable[[Photographs], Message], ...]
    more: dict[str, str] = field(default_factory=dict)


def image(photographs: Photographs) -> Message:
    return user(image_part(data_url(photographs[0])), text_part("Describe it in a sentence."))


def several(photographs: Photographs) -> Message:
    """As questions of MMMU have them."""
    parts = [image_part(data_url(photo.resize((224, 168)))) for photo in photographs]
    return user(text_part("Which of"), parts[0], text_part("and"), parts[1], text_part("is it?"))


def video(_photographs: Photographs) -> Message:
    return user(text_part("Describe the video."), video_part(clips.video("coffee")))


SERVERS = {
    "reasoning": Own(
        "own_reasoning",
        "language",
        "tiny-qwen3-vl",
        (image, video),
        {"reasoning_effort": "none"},
    ),
}


@pytest.fixture(scope="module", params=SERVERS)
def own(request: pytest.FixtureRequest) -> Own:
    return SERVERS[request.param]


def ask(server: Client, message: Message, **more: Any) -> list[tuple[str, float]]:
    """The words of an answer, and how likely they are, by SGLang's client of choice."""
    client = openai.Client(api_key="sk-123456", base_url=f"{server.url}/v1", timeout=120)
    answer = client.chat.completions.create(
        model="default",
        messages=[message],  # type: ignore[list-item]
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        extra_body=more or None,
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content
    return [(one.token, one.logprob) for one in told.content]


def check(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> None:
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-3)


def test_answers_are_one_servers(machine: Machine, photographs: Photographs, own: Own) -> None:
    for case in own.cases:
        message = case(photographs)
        expected = ask(machine.colocated(own.reference), message, **own.more)
        client = machine.use(own.topology).client(own.entry)
        # Again, as its tests of caches ask.
        for _ in range(2):
            check(ask(client, message, **own.more), expected)


def test_many_at_once(machine: Machine, photographs: Photographs, own: Own) -> None:
    """As MMMU is asked."""
    questions = [several([photo.rotate(turn) for photo in photographs]) for turn in range(12)]
    one = machine.colocated(own.reference)
    expected = [ask(one, question) for question in questions]
    servers = machine.use(own.topology)
    client = servers.client(own.entry)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda question: ask(client, question), questions))
    for ours, theirs in zip(answers, expected, strict=True):
        check(ours, theirs)
    for role in servers.roles:
        if role.startswith("encoder"):
            assert delivered(servers, role) > 0, "each has its share"
