"""The encoder's cache and single flight, as its users see them: the same answer, less work."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from integration.client import TOLERANCE, Client, data_url, image_part, png, text_part, user
from integration.counters import counted
from integration.listener import Site
from integration.test_parity import TOKENS
from integration.topology import Machine, Topology

ASKERS = 24


@pytest.fixture
def new_picture(photographs: list[Image.Image], request: pytest.FixtureRequest) -> Image.Image:
    """A photograph that no other test has shown to the encoder."""
    pixels = np.asarray(photographs[0].resize((224, 168))).copy()
    pixels[0, 0] = np.frombuffer(request.node.name.encode()[-3:], np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def photo_url(site: Site, new_picture: Image.Image) -> str:
    """Of that picture, which may be kept for a minute."""
    site.files["/photo.png"] = png(new_picture)
    site.headers = {"Cache-Control": "max-age=60"}
    return f"{site.url}/photo.png"


def sources(topology: Topology) -> Counter[str]:
    """How the embeddings that were asked for came about."""
    return counted(topology.urls["encoder"], "encoder_lookups_total", "source")


def forget(topology: Topology) -> None:
    """The language server has no KV any more; it keeps no embeddings."""
    assert topology.client().flush()


def test_many_who_show_one_new_picture_have_it_encoded_once(
    machine: Machine, qwen2_5: Topology, language: Client, new_picture: Image.Image
) -> None:
    messages = [user(image_part(data_url(new_picture)), text_part("What is this?"))]
    expected = machine.reference(qwen2_5.model, messages, TOKENS)
    before = sources(qwen2_5)
    with ThreadPoolExecutor(ASKERS) as pool:
        asked = range(ASKERS)
        answers = list(pool.map(lambda _: language.generation(*messages, tokens=TOKENS), asked))
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE
    made = sources(qwen2_5) - before
    assert made["computed"] == 1
    # Who comes late finds its KV here.
    assert made["coalesced"] + made["cached"] <= ASKERS - 1


def test_a_cache_that_was_dropped_gives_the_same_answer(
    machine: Machine, qwen2_5: Topology, language: Client, new_picture: Image.Image
) -> None:
    messages = [user(image_part(data_url(new_picture)), text_part("And this?"))]
    expected = machine.reference(qwen2_5.model, messages, TOKENS)
    url = qwen2_5.urls["encoder"]

    def check(source: str) -> None:
        before = sources(qwen2_5)
        forget(qwen2_5)
        language.generation(*messages, tokens=TOKENS).check(expected)
        assert sources(qwen2_5) - before == Counter({source: 1})

    check("computed")
    check("cached")
    held = requests.get(f"{url}/v1/status", timeout=20).json()["cache"]
    assert held["entries"] > 0
    dropped = requests.delete(f"{url}/v1/cache", timeout=20).json()
    assert dropped == {"dropped": held["entries"]}
    check("computed")


def test_the_tower_is_profiled(
    qwen2_5: Topology, language: Client, new_picture: Image.Image, tmp_path: Path
) -> None:
    """By the routes of SGLang's own encoder: what runs it is in the trace."""
    url = qwen2_5.urls["encoder"]
    wanted = {"output_dir": str(tmp_path), "activities": ["CPU"], "with_stack": False}

    def ask(path: str, method: str = "POST", **body: Any) -> int:
        return requests.request(method, f"{url}/{path}", timeout=60, **body).status_code

    assert ask("stop_profile") == 400
    assert ask("start_profile", json=wanted) == 200
    assert ask("start_profile", json=wanted) == 400
    language.answer(user(image_part(data_url(new_picture))))
    assert ask("stop_profile", "GET") == 200
    (trace,) = tmp_path.iterdir()
    assert trace.name.startswith("encoder-rank0-")
    assert "aten::linear" in operators(trace)
    # It ends by itself after so many items.
    assert ask("start_profile", json={**wanted, "num_steps": 1, "profile_prefix": "one"}) == 200
    language.answer(user(image_part(data_url(new_picture.rotate(90)))))
    assert ask("stop_profile") == 400
    (one,) = tmp_path.glob("one-rank0-*")
    assert "aten::linear" in operators(one)


def operators(trace: Path) -> set[str]:
    """The names of what a trace has."""
    return {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}


def test_a_hot_url_is_fetched_once(
    machine: Machine, qwen2_5: Topology, new_picture: Image.Image, site: Site, photo_url: str
) -> None:
    question = text_part("What does it show?")
    shown = [user(image_part(data_url(new_picture)), question)]
    expected = machine.reference(qwen2_5.model, shown, TOKENS)

    def check(fetches: int, role: str = "language") -> Counter[str]:
        """What the encoder did, with so many requests to the media server."""
        before = sources(qwen2_5)
        linked = user(image_part(photo_url), question)
        qwen2_5.client(role).generation(linked, tokens=TOKENS).check(expected)
        assert site.take() == ["/photo.png"] * fetches
        return sources(qwen2_5) - before

    # Whoever asks: the router's prefill and decode servers have the same encoder.
    assert check(1) == Counter({"computed": 1})
    assert check(0) == check(0, "router") == Counter({"cached": 1})
    encoder = qwen2_5.urls["encoder"]
    # Its embedding gone, it is read again, and the answer is the same.
    requests.delete(f"{encoder}/v1/cache", timeout=20)
    assert check(1) == Counter({"computed": 1})
