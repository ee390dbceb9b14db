"""Two encoders that speak gRPC, and a language server that asks them."""

from __future__ import annotations

import concurrent.futures

import pytest
from PIL import Image

from clips import encode, moving_crop
from integration.client import (
    TOLERANCE,
    about_a_crop,
    data_url,
    image_part,
    text_part,
    until,
    user,
    video_part,
)
from integration.counters import delivered, total, wait_until_used
from integration.listener import Site
from integration.topology import Machine, Topology

# What test/encoder shows in one process, with three servers.
pytestmark = pytest.mark.extended
ENCODERS = ("encoder", "encoder@2")


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("grpc")


def test_pictures_and_videos_are_answered_as_by_one_server(
    machine: Machine, topology: Topology, photographs: list[Image.Image]
) -> None:
    pictures = [image_part(data_url(photo)) for photo in photographs]
    video = video_part(encode(moving_crop("coffee", frames=8)))
    for parts in (pictures, [video]):
        machine.check(topology.client(), topology.model, [user(*parts, text_part("What?"))])
    for name in ENCODERS:
        assert delivered(topology, name), "each has had its turn"


def test_a_picture_that_cannot_be_read_is_its_requests_error(topology: Topology) -> None:
    broken = image_part(data_url(b"no picture"))
    response = topology.client().chat(user(broken, text_part("What?")))
    assert response.status_code in (400, 415), response.text
    assert "image 1 of 1" in response.text


def test_a_client_that_leaves_ends_the_work(topology: Topology, site: Site) -> None:
    def cancelled() -> float:
        return sum(
            total(topology.urls[one], "encoder_requests_total", status="499") for one in ENCODERS
        )

    before = cancelled()
    site.slow_s = 30.0
    message = user(image_part(f"{site.url}/slow.png"), text_part("What?"))
    topology.client().leaves(message, after_s=2.0)
    until(lambda: cancelled() > before)
    assert site.asked


def test_an_encoder_that_is_killed_costs_no_request(
    machine: Machine, topology: Topology, photographs: list[Image.Image]
) -> None:
    messages = [about_a_crop(photographs, number) for number in range(8)]
    expected = [machine.reference(topology.model, [one], 4) for one in messages]
    client = topology.client()

    def distance(number: int) -> float:
        return client.generation(messages[number % 8], tokens=4).distance(expected[number % 8])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(distance, number) for number in range(24)]
        asked[4].result()
        topology.servers["encoder@2"].kill()
        assert max(one.result() for one in asked) < TOLERANCE
    topology.start_again("encoder@2")
    wait_until_used(topology, "encoder@2", lambda: distance(0) < TOLERANCE)


def test_sglangs_own_language_server_asks_the_encoder(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    topology = machine.use("grpc_in_tree")
    client, log = topology.client(), topology.log("language")
    assert "EPD MMReceiver: using transport_mode=grpc" in log
    assert "sglang_epd" not in log
    questions = [
        user(*(image_part(data_url(photo)) for photo in photographs), text_part("What?")),
        *(about_a_crop(photographs, number) for number in range(4)),
    ]
    expected = [machine.reference(topology.model, [one], 16) for one in questions]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for answer, one in zip(pool.map(client.generation, questions), expected, strict=True):
            answer.check(one)
    assert total(topology.urls["encoder"], "encoder_requests_total", status="200") == 5
