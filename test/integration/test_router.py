"""Two encoders, two prefill servers and a decode server behind SGLang's own router."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from integration.client import TOLERANCE, until
from integration.counters import delivered, status
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


def test_an_encoder_told_to_stop_finishes_what_it_has(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    """The last test of these servers: there is one encoder afterwards."""
    messages = two(photographs)
    expected = machine.reference("tiny-qwen2_5-vl", messages, TOKENS)
    topology = machine.use("two_of_each")
    router = topology.client("router")
    leaving = topology.servers["encoder@2"]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(router.generation, *messages) for _ in range(12)]
        end = time.monotonic() + 60
        while not status(topology, "encoder@2")["items"]:
            assert time.monotonic() < end, "the encoder was asked for nothing"
        os.kill(leaving.pid, signal.SIGTERM)
        assert max(one.result().distance(expected) for one in answers) < TOLERANCE
    until(lambda: not leaving.running)
    log = topology.log("encoder@2")
    assert "Draining: " in log
    assert "given up" not in log
    assert router.generation(*messages).distance(expected) < TOLERANCE
