"""Two encoders, two prefill servers and a decode server behind SGLang's own router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.test_parity import TOKENS, TOLERANCE, two
from integration.topology import Machine


def test_every_server_takes_part_and_the_answer_is_one_servers(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    messages = two(photographs)
    expected = machine.reference("tiny-qwen2_5-vl", messages, TOKENS)
    topology = machine.use("two_of_each")
    router = Client(topology.urls["router"])
    assert router.generation(*messages).distance(expected) < TOLERANCE
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: router.generation(*messages), range(24)))
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE
    for encoder in ("encoder", "encoder@2"):
        recent = requests.get(f"{topology.urls[encoder]}/v1/status", timeout=20).json()["recent"]
        assert [item for item in recent if item["state"] == "delivered"]
    for prefill in ("prefill", "prefill@2"):
        assert "Encoded 2 items" in topology.servers[prefill].log_path.read_text()


def test_a_bad_image_is_that_requests_error(
    machine: Machine, photographs: list[Image.Image], media_server: str
) -> None:
    topology = machine.use("two_of_each")
    router = Client(topology.urls["router"])
    good = image_part(data_url(photographs[0]))
    bad = router.chat(user(good, image_part(f"{media_server}/none.png"), text_part("What?")))
    assert 400 <= bad.status_code < 500, bad.text
    router.answer(user(good))
    topology.check_alive()
