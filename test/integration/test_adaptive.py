"""A language server that keeps its tower: few images here, many at the encoder, and
everything here when that dies. The answers are one server's throughout."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import (
    IMAGE,
    TOLERANCE,
    Client,
    data_url,
    image_part,
    text_part,
    until,
    user,
)
from integration.counters import delivered, samples
from integration.late import Late
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
    client = topology.client()
    # SGLang takes no more than one image with n > 1.
    one = [user(*few[0]["content"][1:])]
    answer = client.answer(*one)
    samples = client.chat(*one, n=2).json()["choices"]
    assert [sample["message"]["content"] for sample in samples] == [answer] * 2
    assert "data: [DONE]" in client.chat(*few, stream=True).text


def test_what_stays_is_read_by_the_encoders_rules(topology: Topology, few: Messages) -> None:
    """Not by SGLang's, which fetches from anywhere and reads any file."""
    client = topology.client()
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
    client = topology.client()
    plain = client.answer(message)
    hashes = [f"sha256:{hashlib.sha256(media).hexdigest()}" for media in _media(message)]
    assert client.answer(_hashed(message, hashes)) == plain
    for stream in (False, True):
        bad = client.chat(_hashed(message, hashes[::-1]), stream=stream)
        assert bad.status_code == 400, bad.text
        assert f"image 1 of {len(hashes)}: the content hash does not match" in bad.text
    assert client.answer(message) == plain


def test_turns_of_a_session_go_to_encoders(
    machine: Machine, topology: Topology, few: Messages, many: Messages
) -> None:
    """SGLang has the pictures of all turns in one request, and calls the tower on all of them."""
    answers = []
    before = decisions(topology)
    for server in (topology.client(), machine.colocated(topology.model)):
        session = server.post("/open_session", {"capacity_of_str_len": 10_000}).json()
        told: dict[str, Any] = {"id": session}
        for messages in (few, many):
            urls = [part["image_url"]["url"] for part in messages[0]["content"][:-1]]
            answer = server.generate(
                text=IMAGE * len(urls) + "What?",
                image_data=urls,
                sampling_params={"max_new_tokens": 8, "temperature": 0},
                session_params=told,
            )
            assert answer.status_code == 200, answer.text
            told = {"id": session, "rid": answer.json()["meta_info"]["id"]}
            answers.append(answer.json()["text"])
        server.post("/close_session", {"session_id": session})
    assert answers[:2] == answers[2:]
    after = decisions(topology)
    assert after["remote", "session"] == before.get(("remote", "session"), 0) + 2


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


def test_what_is_sent_is_prefilled_early(
    machine: Machine, topology: Topology, site: Site, asked: Messages
) -> None:
    """The scheduler has the request when its first picture has landed."""
    expected = machine.reference(topology.model, asked, TOKENS)
    late, before = Late(topology.urls["language"], site, asked), decisions(topology)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().generation, *late.messages, tokens=TOKENS)
        late.wait()
        assert not answer.done()
        site.released.set()
        answer.result().check(expected)
    after = decisions(topology)
    assert after["remote", "items"] == before["remote", "items"] + 1
    assert late.counted("failed") == 0


def test_a_late_picture_that_fails_is_not_tried_here(
    topology: Topology, site: Site, asked: Messages, few: Messages
) -> None:
    late, before = Late(topology.urls["language"], site, asked), decisions(topology)
    site.files.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(topology.client().chat, *late.messages)
        late.wait()
        site.released.set()
        assert answer.result().status_code == 400
    until(late.gave_back, 10.0, "its items are held")
    after = decisions(topology)
    assert after.get(("local", "failed"), 0) == before.get(("local", "failed"), 0)
    topology.client().answer(*few)


def test_what_is_set_and_not_read_is_named_once(topology: Topology) -> None:
    set_and_not_read = {
        "language": "SGLANG_ENCODER_HTTP_TIMEOUT",
        "encoder": "SGLANG_ENCODER_MAX_BATCH_SIZE",
    }
    for role, name in set_and_not_read.items():
        lines = topology.log(role).splitlines()
        (line,) = [line for line in lines if "Set, but not read by sglang-epd" in line]
        assert f": {name} (instead: " in line


def test_what_an_encoder_that_freezes_has_is_taken_back(
    machine: Machine, topology: Topology, many: Messages
) -> None:
    expected = machine.reference(topology.model, many, TOKENS)
    pid, before = topology.servers["encoder"].pid, decisions(topology)
    language = topology.client()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert language.generation(*many, tokens=TOKENS).distance(expected) < TOLERANCE
    finally:
        os.kill(pid, signal.SIGCONT)
    after = decisions(topology)
    assert after["remote", "items"] == before["remote", "items"] + 1
    assert after["local", "failed"] == before.get(("local", "failed"), 0) + 1


def test_without_an_encoder_everything_is_encoded_here(
    machine: Machine, topology: Topology, check: Check, many: Messages, site: Site
) -> None:
    """The last test of these servers."""
    topology.servers["encoder"].kill()
    before = decisions(topology)
    language = topology.client()
    expected = machine.reference(topology.model, many, TOKENS)
    for _ in range(3):
        assert language.generation(*many, tokens=TOKENS).distance(expected) < TOLERANCE
    check(many, "local", "no_encoder")
    after = decisions(topology)
    _check_urls(language, site, _media(many[0])[0])
    # The first may have been sent before the server knew.
    here = ("failed", "no_encoder")
    assert sum(after.get(("local", why), 0) - before.get(("local", why), 0) for why in here) == 4
    assert "Encoding of media: local (no_encoder)" in topology.log("language")
