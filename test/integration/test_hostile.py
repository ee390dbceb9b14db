"""Clients that leave, floods, and bytes from nowhere."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
import time

import pytest
import requests
from PIL import Image

from integration.client import Client, data_url, image_part, text_part, until, user
from integration.counters import counted, status
from integration.hostile import dear_to_read
from integration.topology import Topology
from sglang_epd.language import manifest
from sglang_epd.wire.messages import Expect

Photographs = list[Image.Image]


@pytest.fixture(scope="module")
def message(photographs: Photographs) -> dict:
    return user(image_part(data_url(photographs[0].resize((224, 168)))), text_part("What?"))


def test_clients_that_leave_are_cleaned_up(
    qwen2_5: Topology, language: Client, message: dict, photographs: Photographs
) -> None:
    large = data_url(photographs[0].resize((1280, 960)))
    body = {
        "model": "default",
        "messages": [user(*[image_part(large)] * 4, text_part("What?"))],
        "max_tokens": 64,
    }
    raw = requests.Request("POST", f"{language.url}/v1/chat/completions", json=body).prepare()
    head = "".join(f"{name}: {value}\r\n" for name, value in raw.headers.items())
    request = f"POST {raw.path_url} HTTP/1.1\r\nHost: test\r\n{head}\r\n".encode() + raw.body
    port = qwen2_5.ports["language"]
    for wait_s in (0.0, 0.05, 0.1, 0.3, 0.6):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request)
            time.sleep(wait_s)
    until(lambda: status(qwen2_5)["requests"] == 0)
    assert status(qwen2_5)["items"] == 0
    assert language.answer(message)
    qwen2_5.check_alive()


def test_garbage_on_the_encode_api(qwen2_5: Topology, language: Client, message: dict) -> None:
    url = f"{qwen2_5.urls['encoder']}/v1/encode"
    for body in (b"", b"EPD", b"EPD\x01\x00\x80", b"EPD\x07\x00\x80", os.urandom(100_000)):
        response = requests.post(url, data=body, timeout=10)
        assert response.status_code == 400
    assert language.answer(message)


def test_of_thousands_of_bad_parts_the_first_is_told(language: Client, message: dict) -> None:
    body = {"model": "default", "messages": [user(*[{}] * 4096)]}
    response = requests.post(f"{language.url}/v1/chat/completions", json=body, timeout=60)
    assert (response.status_code, len(response.content) < 1 << 20) == (400, True)
    assert language.answer(message)


def test_urls_that_are_dear_to_read_silence_no_encoder(
    qwen2_5: Topology, language: Client, message: dict, photographs: Photographs
) -> None:
    """One request of 32 of them, three times; with 10 s of an encoder's silence each before."""
    health = f"{qwen2_5.urls['encoder']}/health"
    before = counted(language.url, "dispatch_moves_total", "state")
    assert before, "the metrics tell of no encoder"
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        while not done.wait(0.05):
            begin = time.monotonic()
            assert requests.get(health, timeout=30).status_code == 200
            waits.append(time.monotonic() - begin)

    with dear_to_read() as url, concurrent.futures.ThreadPoolExecutor(2) as pool:
        probing = pool.submit(probe)
        try:
            for n in range(3):
                urls = [f"{url}/{kind}/{n}/{m}" for m in range(16) for kind in ("chunks", "none")]
                parts = [*map(image_part, urls), text_part("What?")]
                refused = pool.submit(language.chat, user(*parts))
                honest = data_url(photographs[1].resize((224 + 28 * n, 168)))
                assert language.answer(user(image_part(honest), text_part("What?")))
                assert refused.result(timeout=60).status_code == 400
        finally:
            done.set()
        probing.result(timeout=60)
    # Other tests' servers start meanwhile.
    assert max(waits) < 3.0
    assert counted(language.url, "dispatch_moves_total", "state") == before
    assert status(qwen2_5)["bytes"] == 0


@pytest.mark.parametrize(
    "forged",
    [
        ["not base64!"],
        ["bm90IGEgbWFuaWZlc3Q="],
        [],
        # A well-formed one that asks to wait a thousand years.
        manifest.write(Expect("stolen", 1, 3e10), bytes(32)),
        manifest.write(Expect("stolen", 1, float("inf")), bytes(32)),
    ],
    ids=["no base64", "no manifest", "empty", "a thousand years", "for ever"],
)
def test_a_forged_manifest_is_an_error(
    qwen2_5: Topology, language: Client, forged: list[str]
) -> None:
    """SGLang's API lets a user write the fields that a manifest travels in."""
    response = language.generate(
        text="Hello",
        need_wait_for_mm_inputs=True,
        encoder_urls=forged,
        sampling_params={"max_new_tokens": 4},
    )
    assert response.status_code == 400, response.text
    assert "manifest" in response.text
    assert language.answer(user(text_part("Still there?")))
    qwen2_5.check_alive()
