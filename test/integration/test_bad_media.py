"""What is wrong with one picture is that request's 4xx, and nobody else's trouble."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from decoding import attacks
from decoding.trees import Watch
from integration.client import Client, data_url, image_part, text_part, user, video_part
from integration.listener import Site
from integration.test_forms import IMAGE
from integration.topology import Topology
from sglang_epd.machine import decode_mb

LIMIT_S = 10.0


def _truncated_jpeg() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((600, 400), 50).save(file, "JPEG")
    return file.getvalue()[: file.tell() // 2]


# URL, status, and a part of the message.
BAD = {
    "404": ("/missing.png", 400, "HTTP 404"),
    "truncated": (data_url(_truncated_jpeg(), "image/jpeg"), 400, "truncated"),
    "text named png": (data_url(b"This is a text."), 400, "not an image"),
    "empty data URL": ("data:image/png;base64,", 400, "empty"),
    "30,000 px bomb": (data_url(attacks.png_header(30_000, 30_000)), 413, "900 megapixels"),
    "local file": ("file:///etc/hostname", 403, "local files"),
    "link-local": ("http://169.254.169.254/latest/", 403, "not at a public address"),
    "too thin": (data_url(Image.new("RGB", (4000, 10))), 400, "aspect ratio"),
}


@pytest.fixture(scope="module")
def good(photographs: list[Image.Image]) -> str:
    return data_url(photographs[0].resize((112, 112)))


@pytest.mark.parametrize(
    ("kind", "stream"),
    [*((kind, False) for kind in BAD), ("truncated", True), ("local file", True)],
)
def test_a_bad_image_is_a_4xx_that_names_it(
    qwen2_5: Topology, language: Client, good: str, site: Site, kind: str, stream: bool
) -> None:
    bad, status, reason = BAD[kind]
    bad = f"{site.url}{bad}" if bad.startswith("/") else bad
    message = user(image_part(good), image_part(bad), text_part("What is this?"))

    begin = time.monotonic()
    response = language.chat(message, stream=stream)

    assert time.monotonic() - begin < LIMIT_S
    # A stream's errors before its first token are all 400 in SGLang.
    assert response.status_code == (400 if stream else status), response.text
    error = response.json()
    assert error["object"] == "error"
    assert "image 2 of 2" in error["message"]
    assert reason in error["message"]
    assert language.answer(user(image_part(good), text_part("And this?")))
    qwen2_5.check_alive()


def test_a_batch_with_one_bad_image_fails_alone(language: Client, good: str) -> None:
    response = language.generate(
        text=[f"{IMAGE}What is it?"] * 2,
        image_data=[[good], [data_url(b"no picture")]],
        sampling_params={"max_new_tokens": 4, "temperature": 0},
    )
    assert response.status_code == 400
    assert "not an image" in response.text
    assert language.answer(user(image_part(good), text_part("Still there?")))


@pytest.mark.parametrize("count", [0, 2])
def test_placeholders_and_images_must_match(language: Client, good: str, count: int) -> None:
    response = language.generate(
        text=f"{IMAGE * count}What is it?",
        image_data=[good],
        sampling_params={"max_new_tokens": 4, "temperature": 0},
    )
    assert response.status_code == 400
    assert f"{count} image placeholders for 1 image items" in response.text


@pytest.mark.parametrize("known", [False, True])
def test_media_that_no_context_holds_are_refused_before_they_are_laid_out(
    qwen2_5: Topology, language: Client, photographs: list[Image.Image], known: bool
) -> None:
    """A request of one picture may name it again and again."""
    picture = image_part(data_url(photographs[0].resize((448, 448)).rotate(90 * known)))
    if known:
        assert language.answer(user(picture, text_part("What is this?")))
    response = language.chat(user(*[picture] * 160, text_part("What are these?")))
    assert response.status_code == 400, response.text
    assert "40960 tokens" in response.text
    assert "context length (32768 tokens)" in response.text
    assert language.answer(user(picture, text_part("And this?")))
    qwen2_5.check_alive()


def test_memory_of_hostile_media_stays_within_the_budget(
    qwen2_5: Topology, language: Client, good: str
) -> None:
    """All at once at a real encoder; an honest picture beside them is answered."""
    pictures = [
        attacks.tiff_tile(20_000),
        attacks.picture("RGBA", "JPEG2000", 3000, 2500),
        attacks.picture("RGB", "WEBP", 4000, 3000, animated=True, method=0),
        attacks.picture("L", "PNG", 9000, 9000),
    ]
    videos = [
        attacks.samples_claimed(80_000_000),
        attacks.samples_claimed(80_000_000, b"\0\0el"),
        attacks.fragments_claimed(80_000_000),
    ]
    messages = [user(image_part(data_url(data)), text_part("What?")) for data in pictures * 2]
    messages += [user(video_part(data), text_part("What?")) for data in videos * 2]
    encoder = qwen2_5.servers["encoder"].pid
    language.answer(user(image_part(good), text_part("Before?")))
    with Watch(encoder)() as watch, ThreadPoolExecutor(len(messages) + 1) as pool:
        bad = [pool.submit(language.chat, message) for message in messages]
        fine = pool.submit(language.answer, user(image_part(good), text_part("Meanwhile?")))
        assert fine.result()
        statuses = [one.result().status_code for one in bad]
    assert set(statuses[len(pictures) * 2 :]) <= {400, 413}
    assert set(statuses) <= {200, 400, 413}
    # Preparing goes on in the server itself, and torchcodec is loaded beside it.
    assert watch.grown < (decode_mb() << 20) + (256 << 20)
    qwen2_5.check_alive()
