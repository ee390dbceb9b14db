"""Embeddings of prompts with pictures and videos: those of one colocated server."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from PIL import Image

import clips
from integration.client import Client, data_url, until
from integration.counters import delivered, status, total
from integration.listener import Site
from integration.test_forms import IMAGE
from integration.topology import Machine, Topology

Photographs = list[Image.Image]
Input = dict[str, Any]

# Distances of normalised vectors: of those computed in another order, and of two pictures'.
TOLERANCE = 1e-4
APART = 100 * TOLERANCE
MODEL = "tiny-qwen2_5-vl, embeddings"


# One server, the topology that is compared with it, and who is asked there.
ENTRIES = [
    (MODEL, "embeddings", "language"),
    *(
        pytest.param(entry, marks=pytest.mark.extended)
        for entry in (
            (MODEL, "embeddings_others", "language@zmq_to_tokenizer"),
            (MODEL, "embeddings_others", "language@mooncake"),
            ("tiny-qwen2-vl, embeddings", "embeddings_qwen2", "language"),
            ("tiny-qwen3-vl, embeddings", "embeddings_qwen3", "language"),
        )
    ),
]


@pytest.fixture(scope="module", params=ENTRIES, ids="-".join)
def servers(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    names: tuple[str, str, str] = request.param
    return names


@pytest.fixture
def one(machine: Machine, servers: tuple[str, str, str]) -> Client:
    return machine.colocated(servers[0])


@pytest.fixture(scope="module")
def entry(machine: Machine, servers: tuple[str, str, str]) -> tuple[Topology, str]:
    reference, name, role = servers
    machine.colocated(reference)
    return machine.use(name), role


@pytest.fixture
def topology(entry: tuple[Topology, str]) -> Topology:
    return entry[0]


@pytest.fixture
def client(entry: tuple[Topology, str]) -> Client:
    return entry[0].client(entry[1])


def embed(client: Client, inputs: list[Input]) -> list[list[float]]:
    response = client.post("/v1/embeddings", {"model": "default", "input": inputs})
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def page(photographs: Photographs, number: int) -> str:
    """A picture for each number."""
    return data_url(photographs[number % 2].rotate(number).resize((224, 168)))


@pytest.fixture(scope="module")
def pages(photographs: Photographs) -> list[Input]:
    """What is asked for at once: pictures, a video, text beside a picture, text alone."""
    film = data_url(clips.video("coffee"), "video/mp4")
    return [
        {"image": page(photographs, 0)},
        {"text": "What is this?", "image": page(photographs, 1)},
        {"video": film},
        {"text": "No picture here."},
        *({"image": page(photographs, number)} for number in range(2, 8)),
    ]


@pytest.fixture(scope="module")
def expected(
    machine: Machine, servers: tuple[str, str, str], pages: list[Input]
) -> list[list[float]]:
    return embed(machine.colocated(servers[0]), pages)


def check(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    assert max(map(math.dist, found, expected)) < TOLERANCE


def test_embeddings_equal_one_servers(
    client: Client, pages: list[Input], expected: list[list[float]]
) -> None:
    """Cold, each alone, and then in one batch, which finds what has been encoded."""
    check([embed(client, [one])[0] for one in pages[:4]], expected[:4])
    check(embed(client, pages), expected)


def test_an_embedding_depends_on_its_picture(expected: list[list[float]]) -> None:
    """Else parity would prove nothing."""
    pictures = [expected[0], *expected[4:]]
    apart = [math.dist(one, other) for one in pictures for other in pictures if one is not other]
    assert min(apart) > APART


def test_one_that_was_encoded_is_not_encoded_again(
    topology: Topology, client: Client, pages: list[Input], expected: list[list[float]]
) -> None:
    check(embed(client, pages), expected)
    before = delivered(topology)
    for _ in range(2):
        check(embed(client, pages), expected)
    assert embed(client, [{**pages[0], "text": "Another prompt."}])
    assert delivered(topology) == before


def test_memory_is_given_back_with_the_answer(
    entry: tuple[Topology, str], client: Client, photographs: Photographs
) -> None:
    """Not with the next batch, which may have to wait for it."""
    topology, role = entry
    if role != "language":
        pytest.skip("it has no metrics")
    assert embed(client, [{"image": page(photographs, 40)}])
    until(lambda: total(topology.urls[role], "receiver_held_bytes") == 0, seconds=10.0)


def test_the_form_that_sglang_itself_has(
    one: Client, client: Client, photographs: Photographs
) -> None:
    """Of `/encode`: text, text of several pictures, prompts of token ids."""
    pictures = [page(photographs, number) for number in (20, 21)]
    ids = one.post("/tokenize", {"prompt": f"{IMAGE}What?"}).json()["tokens"]
    bodies: list[dict[str, Any]] = [
        {"text": f"{IMAGE}What?", "image_data": pictures[0]},
        {"text": f"{IMAGE}{IMAGE}Both?", "image_data": pictures},
        {"text": [f"{IMAGE}What?", "None."], "image_data": [pictures[0], None]},
        {"input_ids": [ids, ids], "image_data": pictures},
    ]
    for body in bodies:
        answers = [server.post("/encode", body).json() for server in (client, one)]
        ours, theirs = (each if isinstance(each, list) else [each] for each in answers)
        check(*([one["embedding"] for one in answer] for answer in (ours, theirs)))
        counts = [[one["meta_info"]["prompt_tokens"] for one in each] for each in (ours, theirs)]
        assert counts[0] == counts[1]


def test_a_picture_that_fails_is_named_and_hurts_no_other_request(
    topology: Topology,
    client: Client,
    photographs: Photographs,
    site: Site,
    pages: list[Input],
    expected: list[list[float]],
) -> None:
    good = page(photographs, 30)
    bad: dict[str, Callable[[], Input]] = {
        "Not Found": lambda: {"image": f"{site.url}/none.png"},
        "image 1 of 1": lambda: {"image": data_url(b"no picture")},
    }
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(embed, client, [one]) for one in pages[:4]]
        for make in bad.values():
            answer = client.post(
                "/v1/embeddings", {"model": "default", "input": [{"image": good}, make()]}
            )
            assert 400 <= answer.status_code < 500, answer.text
            assert "image 1 of 1" in answer.text
        check([other.result()[0] for other in others], expected[:4])
    topology.check_alive()


def test_a_client_that_leaves_is_forgotten(
    topology: Topology, client: Client, photographs: Photographs, site: Site
) -> None:
    # As long as it answers nothing, the encoder has an item.
    site.slow_s = 30.0
    body = {"model": "default", "input": [{"image": f"{site.url}/{n}.png"} for n in range(2)]}
    with pytest.raises(requests.Timeout):
        requests.post(f"{client.url}/v1/embeddings", json=body, timeout=(5.0, 1.0))
    assert site.asked
    until(lambda: status(topology)["items"] == 0, seconds=10.0)
    assert embed(client, [{"image": page(photographs, 31)}])
    topology.check_alive()
