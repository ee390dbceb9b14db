"""A language server that keeps its tower: few images here, many at the encoder, and
everything here when that dies. The answers are one server's throughout."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.listener import QuietHandler, listening, url_of
from integration.test_parity import TOKENS, TOLERANCE
from integration.topology import Machine, Topology

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("adaptive")


def question(*photos: Image.Image) -> Messages:
    parts = [image_part(data_url(photo)) for photo in photos]
    return [user(*parts, text_part("What is in this picture?"))]


@pytest.fixture(scope="module")
def few(photographs: list[Image.Image]) -> Messages:
    """Two pictures side by side."""
    return question(*(photo.resize((224, 224)) for photo in photographs))


@pytest.fixture(scope="module")
def many(photographs: list[Image.Image]) -> Messages:
    """Three pictures, as many as go to encoders."""
    first, second = photographs
    sizes = ((first, 448), (second, 224), (first, 336))
    return question(*(photo.resize((side, side)) for photo, side in sizes))


def decisions(topology: Topology) -> dict[tuple[str, str], int]:
    """Prompts by where they were encoded, and why."""
    text = requests.get(f"{topology.urls['language']}/metrics", timeout=20).text
    name = "sglang:epd_dispatch_decisions_total"
    found: dict[tuple[str, str], int] = {}
    for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[label["where"], label["why"]] = int(float(value))
    return found


Check = Callable[[Messages, str, str], None]


@pytest.fixture
def check(machine: Machine, topology: Topology) -> Check:
    return lambda messages, where, why: _check(machine, topology, messages, where, why)


def _check(machine: Machine, topology: Topology, messages: Messages, where: str, why: str) -> None:
    """The answer is one server's, and was come by in this way."""
    before = decisions(topology)
    actual = Client(topology.urls["language"]).generation(*messages, tokens=TOKENS)
    expected = machine.reference(topology.model, messages, TOKENS)
    assert actual.tokens == expected.tokens
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.distance(expected) < TOLERANCE
    after = decisions(topology)
    changed = {key: count - before.get(key, 0) for key, count in after.items()}
    assert {key: count for key, count in changed.items() if count} == {(where, why): 1}


def delivered(topology: Topology) -> int:
    status = requests.get(f"{topology.urls['encoder']}/v1/status", timeout=20).json()
    return sum(item["state"] == "delivered" for item in status["recent"])


def test_few_images_stay_and_many_go(
    topology: Topology, check: Check, few: Messages, many: Messages
) -> None:
    check(few, "local", "few")
    assert delivered(topology) == 0
    check(many, "remote", "items")
    assert delivered(topology) == 3
    # Once more, now that prefixes are in the cache, of whichever way they came.
    check(few, "local", "few")


def test_samples_and_streams_of_what_stays(topology: Topology, few: Messages) -> None:
    client = Client(topology.urls["language"])
    # SGLang takes no more than one image with n > 1.
    one = [user(*few[0]["content"][1:])]
    answer = client.answer(*one)
    samples = client.chat(*one, n=2).json()["choices"]
    assert [sample["message"]["content"] for sample in samples] == [answer] * 2
    assert "data: [DONE]" in client.chat(*few, stream=True).text


def test_what_stays_is_read_by_the_encoders_rules(
    topology: Topology, few: Messages, media_server: str
) -> None:
    """Not by SGLang's, which fetches from anywhere and reads any file."""
    client = Client(topology.urls["language"])
    good = few[0]["content"][0]
    for url, status, said in (
        ("file:///etc/passwd", 403, "image 2 of 2"),
        ("data:image/png;base64,aGVsbG8gd29ybGQ=", 400, "not an image"),
    ):
        for stream in (False, True):
            bad = client.chat(user(good, image_part(url)), stream=stream)
            assert bad.status_code == (400 if stream else status), bad.text
            assert said in bad.text
    client.answer(*few)


@pytest.mark.parametrize("way", ["few", "many"])
def test_a_picture_is_compared_with_its_content_hash(
    request: pytest.FixtureRequest, topology: Topology, way: str
) -> None:
    """Few here, many at the encoder."""
    (message,) = request.getfixturevalue(way)
    client = Client(topology.urls["language"])
    plain = client.answer(message)
    hashes = [f"sha256:{hashlib.sha256(media).hexdigest()}" for media in _media(message)]
    assert client.answer(_hashed(message, hashes)) == plain
    for stream in (False, True):
        bad = client.chat(_hashed(message, hashes[::-1]), stream=stream)
        assert bad.status_code == 400, bad.text
        assert f"image 1 of {len(hashes)}: the content hash does not match" in bad.text
    assert client.answer(message) == plain


def _media(message: dict[str, Any]) -> list[bytes]:
    urls = [part["image_url"]["url"] for part in message["content"] if "image_url" in part]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


def _hashed(message: dict[str, Any], hashes: list[str]) -> dict[str, Any]:
    images = [part["image_url"] for part in message["content"] if "image_url" in part]
    parts = [
        {"type": "image_url", "image_url": {**image, "content_hash": given}}
        for image, given in zip(images, hashes, strict=True)
    ]
    return user(*parts, message["content"][-1])


def _check_urls(client: Client, picture: bytes) -> None:
    """What this server reads itself is bounded by SGLang's flags."""
    given = f"sha256:{hashlib.sha256(picture).hexdigest()}"

    class Site(QuietHandler):
        def do_GET(self) -> None:
            body = picture if self.path == "/small" else picture + bytes(1 << 20)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

    def ask(url: str, content_hash: str | None = None) -> requests.Response:
        image = {"url": url, "content_hash": content_hash}
        return client.chat(user({"type": "image_url", "image_url": image}, text_part("What?")))

    with listening(Site) as server:
        url = url_of(server)
        assert ask(f"{url}/small").status_code == 200
        assert ask(f"{url}/small", given).status_code == 200
        other = f"sha256:{'0' * 64}"
        for bad, status, said in (
            (ask(f"{url}/small", other), 400, "the content hash does not match"),
            (ask(f"{url}/large"), 413, "over the limit of 1048576 bytes"),
            (
                ask(url.replace("127.0.0.1", "localhost") + "/small"),
                *(403, "localhost is not in the allowed domains"),
            ),
        ):
            assert bad.status_code == status, bad.text
            assert said in bad.text


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("language", "SGLANG_ENCODER_HTTP_TIMEOUT (instead: SGLANG_EPD_ENCODER_TIMEOUT_S)"),
        (
            "encoder",
            "SGLANG_ENCODER_MAX_BATCH_SIZE (instead: SGLANG_EPD_ENCODER_BATCH_ITEMS and "
            "SGLANG_EPD_ENCODER_BATCH_PATCHES)",
        ),
    ],
)
def test_what_is_set_and_not_read_is_named_once(topology: Topology, role: str, said: str) -> None:
    log = topology.servers[role].log_path.read_text()
    (line,) = [line for line in log.splitlines() if "Set, but not read by sglang-epd" in line]
    assert line.endswith(f": {said}")


def test_what_an_encoder_that_freezes_has_is_taken_back(
    machine: Machine, topology: Topology, many: Messages
) -> None:
    expected = machine.reference(topology.model, many, TOKENS)
    pid, before = topology.servers["encoder"].pid, decisions(topology)
    language = Client(topology.urls["language"])
    os.kill(pid, signal.SIGSTOP)
    try:
        assert language.generation(*many, tokens=TOKENS).distance(expected) < TOLERANCE
    finally:
        os.kill(pid, signal.SIGCONT)
    after = decisions(topology)
    assert after["remote", "items"] == before["remote", "items"] + 1
    assert after["local", "failed"] == before.get(("local", "failed"), 0) + 1


def test_without_an_encoder_everything_is_encoded_here(
    machine: Machine, topology: Topology, check: Check, many: Messages
) -> None:
    """The last test of these servers."""
    topology.servers["encoder"].kill()
    before = decisions(topology)
    language = Client(topology.urls["language"])
    expected = machine.reference(topology.model, many, TOKENS)
    for _ in range(3):
        assert language.generation(*many, tokens=TOKENS).distance(expected) < TOLERANCE
    check(many, "local", "no_encoder")
    after = decisions(topology)
    _check_urls(language, _media(many[0])[0])
    # The first may have been sent before the server knew.
    here = ("failed", "no_encoder")
    assert sum(after.get(("local", why), 0) - before.get(("local", why), 0) for why in here) == 4
    assert (
        "Encoding of media: local (no_encoder)" in topology.servers["language"].log_path.read_text()
    )
