"""`sglang.Engine(language_only=True)`: no HTTP server, and an event loop that runs within calls
only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from integration.client import Client, data_url
from integration.counters import delivered
from integration.test_embeddings import MODEL as EMBEDDINGS
from integration.test_embeddings import TOLERANCE
from integration.test_forms import GREEDY, IMAGE
from integration.topology import Machine, Topology, checkpoint
from sglang_epd.cli.processes import free_port

# An engine takes half a minute to start.
pytestmark = pytest.mark.extended
Body = dict[str, Any]
Ask = Callable[..., Any]
# Longer than encoders are given to say that they live.
PAUSE_S = 4.0
# A form of SGLang's in which embeddings are called features, as pixels are.
FEATURE = "precomputed_embedding"


def options(topology: Topology, **more: Any) -> Body:
    return {
        "model_path": checkpoint(topology.model),
        "dtype": "float32",
        "language_only": True,
        "encoder_urls": [topology.urls["encoder"]],
        "encoder_bootstrap_port": free_port(),
        **more,
    }


@pytest.fixture(scope="module")
def pictures(photographs: list[Image.Image]) -> list[str]:
    return [data_url(photo.resize((224, 168))) for photo in photographs]


def about(*pictures: str, text: str = "What?") -> Body:
    return {"prompt": f"{IMAGE * len(pictures)}{text}", "image_data": list(pictures)}


def expected(server: Client, body: Body) -> str:
    """What one server says."""
    told = {"text": body["prompt"], "image_data": body["image_data"]}
    text: str = server.generate(**told, sampling_params=GREEDY).json()["text"]
    return text


@pytest.mark.parametrize("backend", ["zmq_to_scheduler", "zmq_to_tokenizer"])
def test_answers_are_one_servers(
    qwen2_5: Topology, colocated: Client, pictures: list[str], ask: Ask, backend: str
) -> None:
    greedy = {"sampling_params": GREEDY}
    one, both = about(pictures[0]), about(*pictures, text="Both?")
    ask("start", "it", options(qwen2_5, encoder_transfer_backend=backend))
    before = delivered(qwen2_5)
    assert ask("generate", "it", one | greedy)["text"] == expected(colocated, one)
    assert delivered(qwen2_5) > before
    # Nothing runs in its tokenizer process meanwhile.
    time.sleep(PAUSE_S)
    assert ask("generate", "it", both | greedy)["text"] == expected(colocated, both)
    pieces = ask("stream", "it", both | greedy)
    assert len(pieces) > 1
    assert pieces[-1] == expected(colocated, both)
    many = [about(picture, text=f"What {number}?") for number in range(4) for picture in pictures]
    answers = ask("at_once", "it", [body | greedy for body in many])
    assert [one["text"] for one in answers] == [expected(colocated, body) for body in many]
    broken = about(data_url(b"no picture"))
    assert "image 1 of 1" in ask("generate", "it", broken | greedy)
    assert ask("generate", "it", one | greedy)["text"] == expected(colocated, one)


def test_two_in_one_process(
    qwen2_5: Topology, colocated: Client, pictures: list[str], ask: Ask
) -> None:
    for name in ("first", "second"):
        ask("start", name, options(qwen2_5))
    for number in range(2):
        for name in ("first", "second"):
            body = about(*pictures, text=f"What {number} of the {name}?")
            answer = ask("generate", name, body | {"sampling_params": GREEDY})
            assert answer["text"] == expected(colocated, body)


def test_one_after_another(
    qwen2_5: Topology, colocated: Client, pictures: list[str], ask: Ask
) -> None:
    """In one process, at one port, by each backend in turn."""
    port = free_port()
    for number, backend in enumerate(("zmq_to_scheduler", "zmq_to_tokenizer", "zmq_to_scheduler")):
        told = {"encoder_transfer_backend": backend, "encoder_bootstrap_port": port}
        ask("start", backend, options(qwen2_5, **told))
        body = about(*pictures, text=f"What {number} in turn?")
        before = delivered(qwen2_5)
        answer = ask("generate", backend, body | {"sampling_params": GREEDY})
        assert answer["text"] == expected(colocated, body)
        # Nothing of the engine before is there any more.
        assert delivered(qwen2_5) == before + 2
        assert "epd-receiver" not in ask("shutdown", backend)


def test_embeddings_of_its_caller(
    qwen2_5: Topology, colocated: Client, pictures: list[str], ask: Ask
) -> None:
    """What the tower of `transformers` makes of a picture, in place of the picture."""
    ask("start", "it", options(qwen2_5))
    before = delivered(qwen2_5)
    model = {"model_path": checkpoint(qwen2_5.model), "sampling_params": GREEDY}
    for shown in ([pictures[0]], pictures):
        body = about(*shown, text="What is embedded?")
        answer = ask("precomputed", "it", body | model | {"form": "processor_output"})
        assert answer["text"] == expected(colocated, body)
    refused = ask("precomputed", "it", about(pictures[0]) | model | {"form": FEATURE})
    assert "'precomputed_embeddings', a tensor [tokens, width]" in refused
    assert delivered(qwen2_5) == before
    one = about(pictures[1], text="Not embedded?")
    answer = ask("generate", "it", one | {"sampling_params": GREEDY})
    assert answer["text"] == expected(colocated, one)
    assert delivered(qwen2_5) == before + 1


def test_embeddings(machine: Machine, pictures: list[str], ask: Ask) -> None:
    server = machine.colocated(EMBEDDINGS)
    topology = machine.use("embeddings")
    limits = {"image": {"max_pixels": 25088}}
    ask("start", "it", options(topology, is_embedding=True, mm_process_config=limits))
    for number in range(2):
        body = about(pictures[number], text="Embed it.")
        told = {"text": body["prompt"], "image_data": body["image_data"]}
        theirs = server.post("/encode", told).json()["embedding"]
        assert math.dist(ask("encode", "it", body)["embedding"], theirs) < TOLERANCE
        time.sleep(PAUSE_S * (1 - number))
