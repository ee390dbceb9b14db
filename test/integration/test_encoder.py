"""The encoder's cache and single flight, as its users see them: the same answer, less work."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.test_parity import TOKENS, TOLERANCE
from integration.topology import Machine, Topology

ASKERS = 24


@pytest.fixture
def new_picture(photographs: list[Image.Image], request: pytest.FixtureRequest) -> Image.Image:
    """A photograph that no other test has shown to the encoder."""
    pixels = np.asarray(photographs[0].resize((224, 168))).copy()
    pixels[0, 0] = np.frombuffer(request.node.name.encode()[-3:], np.uint8)
    return Image.fromarray(pixels)


def sources(topology: Topology) -> Counter[str]:
    """How the embeddings that were asked for came about."""
    text = requests.get(f"{topology.urls['encoder']}/metrics", timeout=20).text
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith("sglang:epd_encoder_lookups_total{"):
            name = line.split(chr(34))[1]
            found[name] = int(float(line.rsplit(" ", 1)[1]))
    return found


def forget(topology: Topology) -> None:
    """The language server has no KV any more; it keeps no embeddings."""
    answer = requests.post(f"{topology.urls['language']}/flush_cache", timeout=60)
    assert answer.status_code == 200, answer.text


def test_many_who_show_one_new_picture_have_it_encoded_once(
    machine: Machine, qwen2_5: Topology, new_picture: Image.Image
) -> None:
    messages = [user(image_part(data_url(new_picture)), text_part("What is this?"))]
    expected = machine.reference(qwen2_5.model, messages, TOKENS)
    before = sources(qwen2_5)
    with ThreadPoolExecutor(ASKERS) as pool:
        answers = list(
            pool.map(
                lambda _: Client(qwen2_5.urls["language"]).generation(*messages, tokens=TOKENS),
                range(ASKERS),
            )
        )
    assert max(answer.distance(expected) for answer in answers) < TOLERANCE
    made = sources(qwen2_5) - before
    assert made["computed"] == 1
    # Who comes late finds its KV here.
    assert made["coalesced"] + made["cached"] <= ASKERS - 1


def test_a_cache_that_was_dropped_gives_the_same_answer(
    machine: Machine, qwen2_5: Topology, new_picture: Image.Image
) -> None:
    messages = [user(image_part(data_url(new_picture)), text_part("And this?"))]
    expected = machine.reference(qwen2_5.model, messages, TOKENS)
    language = Client(qwen2_5.urls["language"])
    url = f"{qwen2_5.urls['encoder']}/v1/cache"
    for source in ("computed", "cached"):
        before = sources(qwen2_5)
        forget(qwen2_5)
        assert language.generation(*messages, tokens=TOKENS).distance(expected) < TOLERANCE
        assert sources(qwen2_5) - before == Counter({source: 1})
    held = requests.get(url, timeout=20).json()
    assert held["entries"] == len(held["shown"]) > 0
    assert held["bytes"] == sum(entry["bytes"] for entry in held["shown"])
    assert requests.delete(url, timeout=20).json() == {"dropped": held["entries"]}
    assert requests.get(url, timeout=20).json()["bytes"] == 0
    before = sources(qwen2_5)
    forget(qwen2_5)
    assert language.generation(*messages, tokens=TOKENS).distance(expected) < TOLERANCE
    assert sources(qwen2_5) - before == Counter({"computed": 1})
