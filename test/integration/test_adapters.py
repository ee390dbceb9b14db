"""LoRA adapters: each request's answer is that of one server with the same adapter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adapters import RANK, adapter
from integration.client import (
    TOLERANCE,
    Client,
    about_a_crop,
    data_url,
    image_part,
    text_part,
    user,
)
from integration.counters import answered
from integration.test_parity import CASES
from integration.topology import Machine, Topology, checkpoint

pytestmark = pytest.mark.extended
Photographs = list[Image.Image]
MODEL = "tiny-qwen2_5-vl"
TOKENS = 8
# None is the model without one.
NAMES = (None, "first", "second")
LATER = "later"
ENTRIES = {
    "language": ("encoder", "language"),
    "router": ("encoder", "prefill", "decode", "router"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    names = [name for name in NAMES if name] + [LATER]
    return {name: adapter(checkpoint(MODEL), place / name, seed) for seed, name in enumerate(names)}


@pytest.fixture(scope="module")
def flags(folders: dict[str, Path]) -> str:
    first = " ".join(f"{name}={folders[name]}" for name in NAMES if name)
    return f"--enable-lora --lora-paths {first} --max-lora-rank {RANK} --max-loras-per-batch 4"


@pytest.fixture(scope="module")
def one(machine: Machine, flags: str) -> Iterator[Client]:
    with machine.lend(Topology(MODEL, ("colocated",), flags={"colocated": flags})) as topology:
        yield topology.client("colocated")


@pytest.fixture(scope="module", params=ENTRIES)
def servers(
    machine: Machine, one: Client, flags: str, request: pytest.FixtureRequest
) -> Iterator[tuple[Topology, Client]]:
    roles = ENTRIES[request.param]
    # Start scripts give encoders what they give the others.
    own = {role: f"{flags} --enable-cache-report" for role in roles if role != "router"}
    with machine.lend(Topology(MODEL, roles, flags=own)) as topology:
        yield topology, topology.client(request.param)


@pytest.fixture
def client(servers: tuple[Topology, Client]) -> Client:
    return servers[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_log_probabilities_equal_one_servers(
    one: Client, client: Client, photographs: Photographs, case: Any
) -> None:
    messages = case(photographs)
    for name in NAMES:
        expected = one.generation(*messages, tokens=TOKENS, lora_path=name)
        # Again, out of the prefix cache.
        for _ in range(2):
            client.generation(*messages, tokens=TOKENS, lora_path=name).check(expected)


def test_the_answer_depends_on_the_adapter_and_on_the_picture(
    client: Client, photographs: Photographs
) -> None:
    """Else parity would prove nothing."""
    answers = [
        client.generation(about_a_crop([photograph] * 2, 0), tokens=1, lora_path=name)
        for photograph in photographs
        for name in NAMES
    ]
    for number, answer in enumerate(answers):
        for other in answers[:number]:
            assert answer.change(other) > 100 * TOLERANCE


def test_adapters_share_embeddings_and_no_prefix(
    servers: tuple[Topology, Client], one: Client, photographs: Photographs
) -> None:
    topology, client = servers
    question = about_a_crop(photographs, 100)
    cached = []
    for name in NAMES * 2:
        expected = one.generation(question, tokens=TOKENS, lora_path=name)
        before = answered(topology)
        response = client.chat(question, lora_path=name).json()
        cached.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
        client.generation(question, tokens=TOKENS, lora_path=name).check(expected)
        assert answered(topology) - before == (1 if len(cached) == 1 else 0)
    # The system's prompt alone, which earlier questions of each had.
    picture = 70
    assert max(cached[:3]) < picture < min(cached[3:]), cached


def test_many_at_once(one: Client, client: Client, photographs: Photographs) -> None:
    asked = [(about_a_crop(photographs, number), NAMES[number % 3]) for number in range(12)]
    expected = [one.generation(message, tokens=TOKENS, lora_path=name) for message, name in asked]
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda each: client.generation(each[0], tokens=TOKENS, lora_path=each[1]), asked
            )
        )
    for answer, theirs in zip(answers, expected, strict=True):
        answer.check(theirs)


def test_adapters_come_and_go(
    servers: tuple[Topology, Client],
    one: Client,
    folders: dict[str, Path],
    photographs: Photographs,
) -> None:
    topology, client = servers
    roles = [role for role in ("language", "prefill", "decode") if role in topology.roles]
    holders = [one, *map(topology.client, roles)]
    question = about_a_crop(photographs, 200)

    def tell(path: str, **body: str) -> None:
        for holder in holders:
            response = holder.post(path, {"lora_name": LATER, **body})
            assert response.status_code == 200, response.text

    refused = client.chat(question, lora_path=LATER)
    assert refused.status_code == 400, refused.text
    assert LATER in refused.text
    tell("/load_lora_adapter", lora_path=str(folders[LATER]))
    expected = one.generation(question, tokens=TOKENS, lora_path=LATER)
    client.generation(question, tokens=TOKENS, lora_path=LATER).check(expected)
    tell("/unload_lora_adapter")
    # SGLang loads one that it knows again.
    client.generation(question, tokens=TOKENS, lora_path=LATER).check(expected)
    photo = image_part(data_url(photographs[0].resize((224, 168))))
    client.answer(user(photo, text_part("Still there?")), lora_path=NAMES[1])
    topology.check_alive()
