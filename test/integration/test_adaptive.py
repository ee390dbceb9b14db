"""A language server that keeps its tower: small images here, large ones at the encoder, and
everything here when that dies. The answers are one server's throughout."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import TOLERANCE, Client, data_url, image_part, text_part, user
from integration.counters import delivered, samples
from integration.listener import Site
from integration.test_parity import TOKENS, Messages
from integration.topology import Machine, Topology


@pytest.fixture(scope="module")
def topology(machine: Machine) -> Topology:
    return machine.use("adaptive")


def question(*photos: Image.Image) -> Messages:
    parts = [image_part(data_url(photo)) for photo in photos]
    return [user(*parts, text_part("What is in this picture?"))]


@pytest.fixture(scope="module")
def small(photographs: list[Image.Image]) -> Messages:
    """Two pictures side by side, of 256 patches each."""
    return question(*(photo.resize((224, 224)) for photo in photographs))


@pytest.fixture(scope="module")
def large(photographs: list[Image.Image]) -> Messages:
    """One picture of 1024 patches, one of 256."""
    first, second = photographs
    return question(first.resize((448, 448)), second.resize((224, 224)))


def decisions(topology: Topology) -> dict[tuple[str, str], int]:
    """Prompts by where they were encoded, and why."""
    found = samples(topology.urls["language"], "dispatch_decisions_total")
    return {(labels["where"], labels["why"]): int(value) for labels, value in found}


Check = Callable[[Messages, str, str], None]


@pytest.fixture
def check(machine: Machine, topology: Topology) -> Check:
    """The answer is one server's, and was come by in this way."""

    def check(messages: Messages, where: str, why: str) -> None:
        before = decisions(topology)
        machine.check(topology.client(), topology.model, messages, TOKENS)
        after = decisions(topology)
        changed = {key: count - before.get(key, 0) for key, count in after.items()}
        assert {key: count for key, count in changed.items() if count} == {(where, why): 1}

    return check


def test_small_images_stay_and_large_ones_go(
    topology: Topology, check: Check, small: Messages, large: Messages
) -> None:
    check(small, "local", "small")
    assert delivered(topology) == 0
    check(large, "remote", "cost")
    assert delivered(topology) == 2
    # Once more, now that prefixes are in the cache, of whichever way they came.
    check(small, "local", "small")


def test_samples_and_streams_of_what_stays(topology: Topology, small: Messages) -> None:
    client = topology.client()
    # SGLang takes no more than one image with n > 1.
    one = [user(*small[0]["content"][1:])]
    answer = client.answer(*one)
    samples = client.chat(*one, n=2).json()["choices"]
    assert [sample["message"]["content"] for sample in samples] == [answer] * 2
    assert "data: [DONE]" in client.chat(*small, stream=True).text


def test_what_stays_is_read_by_the_encoders_rules(topology: Topology, small: Messages) -> None:
    """Not by SGLang's, which fetches from anywhere and reads any file."""
    client = topology.client()
    good = small[0]["content"][0]
    for url, status, said in (
        ("file:///etc/passwd", 403, "image 2 of 2"),
        ("data:image/png;base64,aGVsbG8gd29ybGQ=", 400, "not an image"),
    ):
        for stream in (False, True):
            bad = client.chat(user(good, image_part(url)), stream=stream)
            assert bad.status_code == (400 if stream else status), bad.text
            assert said in bad.text
    client.answer(*small)


@pytest.mark.parametrize("way", ["small", "large"])
def test_a_picture_is_compared_with_its_content_hash(
    request: pytest.FixtureRequest, topology: Topology, way: str
) -> None:
    """Small ones here, large ones at the encoder."""
    (message,) = request.getfixturevalue(way)
    client = topology.client()
    plain = client.answer(message)
    hashes = [f"sha256:{hashlib.sha256(media).hexdigest()}" for media in _media(message)]
    assert client.answer(_hashed(message, hashes)) == plain
    for stream in (False, True):
        bad = client.chat(_hashed(message, hashes[::-1]), stream=stream)
        assert bad.status_code == 400, bad.text
        assert "image 1 of 2: the content hash does not match" in bad.text
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


def _check_urls(client: Client, site: Site, picture: bytes) -> None:
    """What this server reads itself is bounded by SGLang's flags."""
    site.files |= {"/small": picture, "/large": picture + bytes(1 << 20)}
    given = f"sha256:{hashlib.sha256(picture).hexdigest()}"

    def ask(url: str, content_hash: str | None = None) -> requests.Response:
        image = {"url": url, "content_hash": content_hash}
        return client.chat(user({"type": "image_url", "image_url": image}, text_part("What?")))

    assert ask(f"{site.url}/small").status_code == 200
    assert ask(f"{site.url}/small", given).status_code == 200
    other, named = f"sha256:{'0' * 64}", site.url.replace("127.0.0.1", "localhost")
    for bad, status, said in (
        (ask(f"{site.url}/small", other), 400, "the content hash does not match"),
        (ask(f"{site.url}/large"), 413, "over the limit of 1048576 bytes"),
        (ask(f"{named}/small"), 403, "localhost is not in the allowed domains"),
    ):
        assert bad.status_code == status, bad.text
        assert said in bad.text


def test_what_is_set_and_not_read_is_named_once(topology: Topology) -> None:
    set_and_not_read = {
        "language": "SGLANG_ENCODER_HTTP_TIMEOUT",
        "encoder": "SGLANG_ENCODER_MAX_BATCH_SIZE",
    }
    for role, name in set_and_not_read.items():
        lines = topology.log(role).splitlines()
        (line,) = [line for line in lines if "Set, but not read by sglang-epd" in line]
        assert f": {name} (instead: " in line


def test_a_request_may_name_its_encoders(
    topology: Topology, small: Messages, large: Messages
) -> None:
    client = topology.client()
    known = topology.urls["encoder"].removeprefix("http://")
    body = {"model": "default", "messages": large, "max_tokens": 4, "temperature": 0}
    before = delivered(topology)
    for messages in (small, large):
        for stream in (False, True):
            named = client.post(
                "/v1/chat/completions",
                {**body, "messages": messages, "stream": stream},
                headers={"x-encoder-hosts-ports": f"10.0.0.1:1, {known}"},
            )
            assert named.status_code == 200, named.text
    assert delivered(topology) == before + 8
    for stream in (False, True):
        unknown = client.post(
            "/v1/chat/completions",
            {**body, "stream": stream},
            headers={"x-encoder-hosts-ports": "10.0.0.1:1"},
        )
        assert unknown.status_code == 400
        assert "x-encoder-hosts-ports" in unknown.text
    assert decisions(topology)["remote", "chosen"] == 4


def test_what_an_encoder_that_freezes_has_is_taken_back(
    machine: Machine, topology: Topology, large: Messages
) -> None:
    expected = machine.reference(topology.model, large, TOKENS)
    pid, before = topology.servers["encoder"].pid, decisions(topology)
    # Named, because by what it costs it may stay.
    named = {"x-encoder-hosts-ports": topology.urls["encoder"].removeprefix("http://")}
    language = topology.client(headers=named)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert language.generation(*large, tokens=TOKENS).distance(expected) < TOLERANCE
    finally:
        os.kill(pid, signal.SIGCONT)
    after = decisions(topology)
    assert after["remote", "chosen"] == before["remote", "chosen"] + 1
    assert after["local", "failed"] == before.get(("local", "failed"), 0) + 1


def test_without_an_encoder_everything_is_encoded_here(
    machine: Machine, topology: Topology, check: Check, large: Messages, site: Site
) -> None:
    """The last test of these servers."""
    topology.servers["encoder"].kill()
    before = decisions(topology)
    language = topology.client()
    expected = machine.reference(topology.model, large, TOKENS)
    for _ in range(3):
        assert language.generation(*large, tokens=TOKENS).distance(expected) < TOLERANCE
    check(large, "local", "no_encoder")
    after = decisions(topology)
    _check_urls(language, site, _media(large[0])[0])
    # The first may have been sent, or kept for what it costs, before anybody knew.
    here = ("failed", "no_encoder", "cost")
    assert sum(after.get(("local", why), 0) - before.get(("local", why), 0) for why in here) == 4
    assert "Encoding of media: local (no_encoder)" in topology.log("language")
