"""A receive budget of eight images, and what is asked of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from integration.client import (
    GREEDY,
    IMAGE,
    TOLERANCE,
    Client,
    data_url,
    image_part,
    text_part,
    user,
)
from integration.counters import counted, total
from integration.topology import Machine, Topology

Photographs = list[Image.Image]


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("reuse")


@pytest.fixture
def client(topology: Topology) -> Client:
    return topology.client("language@budget")


def test_requests_wait_for_memory_and_all_are_answered(
    machine: Machine, topology: Topology, client: Client, photographs: Photographs
) -> None:
    pictures = [photographs[index % 2].resize((448, 448)).rotate(7 * index) for index in range(4)]
    parts = [image_part(data_url(picture)) for picture in pictures]
    message = user(*parts, text_part("What do these have in common?"))
    expected = machine.colocated(topology.model).generation(message)
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: client.generation(message), range(24)))
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE
    assert total(client.url, "receiver_waits_total") > 0
    assert counted(client.url, "receiver_payloads_total", "landing").keys() == {"inline"}


def test_more_than_the_budget_fails_at_once_and_nobody_else(
    topology: Topology, client: Client, photographs: Photographs
) -> None:
    square = photographs[0].resize((448, 448))
    part = image_part(data_url(square))
    huge = image_part(data_url(photographs[0].resize((1920, 1344))))
    # No two alike, because those may share an embedding, and none that was shown before.
    nine = [image_part(data_url(square.rotate(5 * number + 3))) for number in range(9)]
    for parts in ([huge] * 2, nine):
        answer = client.chat(user(*parts))
        assert answer.status_code == 413, answer.text
        assert "larger than this server takes" in answer.text
    client.answer(user(part))
    topology.check_alive()


def test_every_step_is_counted(client: Client, photographs: Photographs) -> None:
    steps = [f"receiver_{name}_total" for name in ("offers", "grants", "received_bytes")]
    before = [total(client.url, step) for step in steps]
    client.answer(user(image_part(data_url(photographs[0]))))
    assert all(total(client.url, step) > was for step, was in zip(steps, before, strict=True))
    assert counted(client.url, "receiver_declines_total", "reason").keys() >= {"too_large"}


def test_prompts_of_a_batch_with_samples_hold_no_memory_for_each_other(
    machine: Machine, topology: Topology, client: Client, photographs: Photographs
) -> None:
    """SGLang asks for the samples when all prompts have been prefilled."""
    square = photographs[1].resize((448, 448))
    urls = [data_url(square.rotate(3 * number + 1)) for number in range(12)]
    body = {"text": [f"{IMAGE}What?"] * len(urls), "image_data": [[url] for url in urls]}
    one = machine.colocated(topology.model).generate(**body, sampling_params=GREEDY).json()
    answer = client.generate(**body, sampling_params={**GREEDY, "n": 2})
    assert answer.status_code == 200, answer.text
    assert [sample["text"] for sample in answer.json()] == [
        expected["text"] for expected in one for _ in range(2)
    ]
