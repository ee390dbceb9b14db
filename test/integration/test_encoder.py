"""The encoder's cache and single flight, as its users see them: the same answer, less work."""

from __future__ import annotations

import http.server
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.listener import QuietHandler, listening, url_of
from integration.test_parity import TOKENS, TOLERANCE
from integration.topology import Machine, Topology

ASKERS = 24


@pytest.fixture
def new_picture(photographs: list[Image.Image], request: pytest.FixtureRequest) -> Image.Image:
    """A photograph that no other test has shown to the encoder."""
    pixels = np.asarray(photographs[0].resize((224, 168))).copy()
    pixels[0, 0] = np.frombuffer(request.node.name.encode()[-3:], np.uint8)
    return Image.fromarray(pixels)


class PhotoServer(http.server.ThreadingHTTPServer):
    """A real media server with one picture and its validator.

    Attributes:
        photo: the picture's bytes.
        cache_control: sent with each answer.
    """

    photo = b""
    etag = '"v1"'
    cache_control = "no-cache"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked: list[str] = []

    @property
    def url(self) -> str:
        return f"{url_of(self)}/photo.png"

    def take(self) -> list[str]:
        """What the requests since the last time were conditional on."""
        asked, self._asked = self._asked, []
        return asked


class _PhotoHandler(QuietHandler):
    def do_GET(self) -> None:
        site = self.server
        assert isinstance(site, PhotoServer)
        condition = self.headers.get("If-None-Match", "")
        site._asked.append(condition)
        body = site.photo if condition != site.etag else b""
        self.send_response(200 if body else 304)
        self.send_header("ETag", site.etag)
        self.send_header("Cache-Control", site.cache_control)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def photo_server(new_picture: Image.Image) -> Iterator[PhotoServer]:
    file = io.BytesIO()
    new_picture.save(file, "PNG")
    with listening(_PhotoHandler, PhotoServer) as server:
        assert isinstance(server, PhotoServer)
        server.photo = file.getvalue()
        yield server


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


def test_a_hot_url_costs_at_most_one_conditional_request(
    machine: Machine, qwen2_5: Topology, new_picture: Image.Image, photo_server: PhotoServer
) -> None:
    question = text_part("What does it show?")
    shown = [user(image_part(data_url(new_picture)), question)]
    expected = machine.reference(qwen2_5.model, shown, TOKENS)
    linked = [user(image_part(photo_server.url), question)]
    # Whoever asks: the router's prefill and decode servers have the same encoder.
    for role, asked, made in (
        ("language", "", "computed"),
        ("language", photo_server.etag, "cached"),
        ("router", photo_server.etag, "cached"),
    ):
        before = sources(qwen2_5)
        answer = Client(qwen2_5.urls[role]).generation(*linked, tokens=TOKENS)
        assert answer.distance(expected) < TOLERANCE
        assert photo_server.take() == [asked]
        assert sources(qwen2_5) - before == Counter({made: 1})
    # The next 304 makes it fresh for a minute.
    photo_server.cache_control = "max-age=60"
    language = Client(qwen2_5.urls["language"])
    for conditions in ([photo_server.etag], [], []):
        assert language.generation(*linked, tokens=TOKENS).distance(expected) < TOLERANCE
        assert photo_server.take() == conditions
    encoder = qwen2_5.urls["encoder"]
    urls = requests.get(f"{encoder}/v1/urls", timeout=20).json()
    (known,) = [entry for entry in urls["shown"] if entry["url"] == photo_server.url]
    assert known["bytes"] == len(photo_server.photo)
    # Its embedding gone, it is read in full, and the answer is the same.
    requests.delete(f"{encoder}/v1/cache", timeout=20)
    before = sources(qwen2_5)
    assert language.generation(*linked, tokens=TOKENS).distance(expected) < TOLERANCE
    assert photo_server.take() == [""]
    assert sources(qwen2_5) - before == Counter({"computed": 1})
