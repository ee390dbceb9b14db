"""Encoder, prefill and decode: an image is read once, by the encoder, and the answer is
that of one server."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, user
from integration.listener import QuietHandler, listening, url_of
from integration.topology import Machine, Topology

TOLERANCE = 1e-3
LIMIT_S = 20.0
Urls = list[str]


class MediaServer:
    """Serves PNGs on loopback and counts how often each was asked for."""

    def __init__(self, photographs: list[Image.Image]) -> None:
        self.asked: Counter[str] = Counter()
        files: dict[str, bytes] = {}
        for index, photo in enumerate(photographs):
            file = io.BytesIO()
            photo.resize((320, 224)).save(file, "PNG")
            files[f"/{index}.png"] = file.getvalue()
        self.slow_s = 0.0
        self.released = threading.Event()
        owner, asked = self, self.asked

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                asked[self.path] += 1
                owner.released.wait(owner.slow_s)
                body = files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "image/png")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.handler = Handler
        self.url = ""


@pytest.fixture
def media(photographs: list[Image.Image]) -> Iterator[MediaServer]:
    site = MediaServer(photographs)
    with listening(site.handler) as server:
        site.url = url_of(server)
        yield site
        site.released.set()


def one(urls: Urls) -> list[dict[str, Any]]:
    return [user(image_part(urls[0]), text_part("What is in this picture?"))]


def two(urls: Urls) -> list[dict[str, Any]]:
    first, second = (image_part(url) for url in urls)
    return [user(text_part("First"), first, text_part("and second"), second, text_part("compare"))]


def side_by_side(urls: Urls) -> list[dict[str, Any]]:
    return [user(*(image_part(url) for url in urls))]


def two_turns(urls: Urls) -> list[dict[str, Any]]:
    return [
        user(image_part(urls[0]), text_part("What is this?")),
        {"role": "assistant", "content": "A temple."},
        user(text_part("And this one"), image_part(urls[1]), text_part("beside it?")),
    ]


CASES = [one, two, side_by_side, two_turns]


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def topology(machine: Machine, request: pytest.FixtureRequest) -> Topology:
    return machine.use(request.param)


@pytest.fixture
def router(topology: Topology) -> Client:
    return Client(topology.urls["router"])


@pytest.fixture
def laid_out(topology: Topology) -> Callable[[str], float]:
    return _laid_out(topology)


def _laid_out(topology: Topology) -> Callable[[str], float]:
    """How many prompts the decode server has laid out in a way, since this was called."""

    def count(way: str) -> float:
        text = requests.get(f"{topology.urls['decode']}/metrics", timeout=20).text
        pattern = rf'^sglang:epd_decode_prompts_total{{.*layout="{way}".*}} (\S+)$'
        return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))

    before = {way: count(way) for way in ("known", "own", "failed")}
    return lambda way: count(way) - before[way]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_an_image_is_downloaded_once_and_the_answer_is_one_servers(
    machine: Machine,
    topology: Topology,
    router: Client,
    media: MediaServer,
    laid_out: Callable[[str], float],
    case: Callable[[Urls], Any],
) -> None:
    messages = case([f"{media.url}/0.png", f"{media.url}/1.png"])
    expected = machine.colocated(topology.model).generation(*messages)
    named = set(media.asked)
    media.asked.clear()

    actual = router.generation(*messages)

    assert media.asked == dict.fromkeys(named, 1)
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.tokens == expected.tokens
    assert (laid_out("known"), laid_out("own"), laid_out("failed")) == (1, 0, 0)
    assert actual.distance(expected) < TOLERANCE


def test_an_image_named_twice_is_laid_out_twice(
    machine: Machine, topology: Topology, router: Client, media: MediaServer
) -> None:
    messages = side_by_side([f"{media.url}/0.png"] * 2)
    expected = machine.colocated(topology.model).generation(*messages)
    media.asked.clear()
    actual = router.generation(*messages)
    # Two items, for all that the language server knows; encoders share one answer between
    # those who wait for it.
    assert media.asked in ({"/0.png": 1}, {"/0.png": 2})
    assert actual.prompt_tokens == expected.prompt_tokens
    assert actual.distance(expected) < TOLERANCE


def test_each_prompt_of_a_batch_has_its_own_layouts(
    machine: Machine,
    topology: Topology,
    router: Client,
    photographs: list[Image.Image],
    laid_out: Callable[[str], float],
) -> None:
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    body = {
        "text": [f"{mark}What is it?", "No picture here.", f"{mark}{mark}And these?"],
        "image_data": [
            [data_url(photographs[0].resize((112, 112)))],
            None,
            [data_url(photo.resize((112, 224))) for photo in photographs],
        ],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    }
    servers = (machine.colocated(topology.model), router)
    answers = [server.generate(**body) for server in servers]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    expected, actual = (
        [(part["text"], part["meta_info"]["prompt_tokens"]) for part in answer.json()]
        for answer in answers
    )
    assert actual == expected
    assert (laid_out("known"), laid_out("own")) == (2, 0)


def test_a_burst_is_answered_without_a_second_download(
    qwen2_5: Topology, media: MediaServer
) -> None:
    router, laid_out = Client(qwen2_5.urls["router"]), _laid_out(qwen2_5)
    messages = [one([f"{media.url}/0.png"]), two([f"{media.url}/0.png", f"{media.url}/1.png"])]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: router.answer(*messages[n % 2]), range(16)))
    # Once an item at most: encoders share one answer between those who wait for it.
    assert set(media.asked) == {"/0.png", "/1.png"}
    assert media.asked["/0.png"] <= 16
    assert media.asked["/1.png"] <= 8
    assert (laid_out("known"), laid_out("own")) == (16, 0)


def test_who_leaves_both_servers_is_waited_for_by_neither(
    qwen2_5: Topology, media: MediaServer
) -> None:
    """As a router does that gives a request up; the image would take longer than that."""
    router, laid_out = Client(qwen2_5.urls["router"]), _laid_out(qwen2_5)
    media.slow_s = 60.0
    begin = time.monotonic()
    body = {
        "model": "default",
        "messages": one([f"{media.url}/0.png"]),
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": qwen2_5.ports["prefill bootstrap"],
        "bootstrap_room": 4711,
    }

    def ask_and_leave(role: str) -> None:
        # The decode server may hear that the prefill server was left, and answer before it is.
        with contextlib.suppress(requests.Timeout):
            requests.post(f"{qwen2_5.urls[role]}/v1/chat/completions", json=body, timeout=1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask_and_leave, ("prefill", "decode")))
    while not laid_out("failed"):
        assert time.monotonic() < begin + 8, "the encoder's own limit on fetching is 10 s"
        time.sleep(0.2)
    media.slow_s = 0.0
    assert router.answer(*one([f"{media.url}/1.png"]))
    qwen2_5.check_alive()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(
    ("bad", "status", "reason"),
    [
        ("/missing.png", 400, "HTTP 404"),
        ("file:///etc/hostname", 403, "local files"),
        ("data:image/png;base64,", 400, "empty"),
    ],
    ids=["404", "forbidden", "unreadable"],
)
def test_a_bad_image_ends_on_both_servers(
    qwen2_5: Topology,
    media: MediaServer,
    bad: str,
    status: int,
    reason: str,
    stream: bool,
) -> None:
    router = Client(qwen2_5.urls["router"])
    good = f"{media.url}/0.png"
    url = f"{media.url}{bad}" if bad.startswith("/") else bad
    begin = time.monotonic()

    response = router.chat(
        user(image_part(good), image_part(url), text_part("What is this?")), stream=stream
    )

    assert time.monotonic() - begin < LIMIT_S
    # The mini-lb answers a stream before its servers have.
    assert response.status_code == (200 if stream else status), response.text
    assert "image 2 of 2" in response.text
    assert reason in response.text
    assert media.asked["/0.png"] <= 1
    assert router.answer(user(image_part(good), text_part("And this?")))
    qwen2_5.check_alive()
