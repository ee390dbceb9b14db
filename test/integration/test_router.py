"""Two encoders, two prefill servers and a decode server behind SGLang's own router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from integration.client import TOLERANCE
from integration.counters import delivered
from integration.test_parity import TOKENS, two
from integration.topology import Machine


def test_every_server_takes_part_and_the_answer_is_one_servers(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    messages = two(photographs)
    expected = machine.reference("tiny-qwen2_5-vl", messages, TOKENS)
    topology = machine.use("two_of_each")
    router = topology.client("router")
    assert router.generation(*messages).distance(expected) < TOLERANCE
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: router.generation(*messages), range(24)))
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE
    for encoder in ("encoder", "encoder@2"):
        assert delivered(topology, encoder)
    for prefill in ("prefill", "prefill@2"):
        assert "Delivered 2 items" in topology.log(prefill)
