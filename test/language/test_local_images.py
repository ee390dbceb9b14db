from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import sys
import time

import pytest
from aiohttp import web
from PIL import Image

import sites
from media.samples import encoded, local_limits
from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaError,
    MediaForbiddenError,
    MediaTooLargeError,
    MediaTypeError,
)
from sglang_epd.language.local_images import LocalImages
from sglang_epd.media import MediaLimits, digest
from sglang_epd.namespace import embedding_key
from sglang_epd.wire.http import EncodeItem
from waiting import until


def png(width: int = 8, height: int = 6, mode: str = "RGBA") -> bytes:
    return encoded(Image.new(mode, (width, height), 7))


def item(data: bytes | None = None, url: str | None = None, number: int = 0, **changes):
    values = {"modality": "IMAGE", "label": f"image {number + 1} of 2", "options": {}, **changes}
    return EncodeItem(item=number, data=data, url=url, **values)


def reader(limits: MediaLimits, fetched_bytes: int = 1 << 28) -> LocalImages:
    return LocalImages("a/b/c", limits, fetched_bytes=fetched_bytes, decode_bytes=1 << 28)


@pytest.fixture
async def images():
    images = LocalImages(
        "a/b/c", MediaLimits(max_pixels=10_000), fetched_bytes=1 << 28, decode_bytes=1 << 28
    )
    yield images
    await images.close()


def soon() -> float:
    return time.monotonic() + 10


async def test_images_come_with_the_keys_that_encoders_give_them(images):
    first, second = png(), png(20, 10)
    found = await images.read(
        [item(first), item(second, number=1, options={"detail": "low"})], soon()
    )
    assert [one.image.size for one in found] == [(8, 6), (20, 10)]
    assert {one.image.mode for one in found} == {"RGB"}
    assert [one.key for one in found] == [
        embedding_key("a/b/c", digest(first), "IMAGE", {}),
        embedding_key("a/b/c", digest(second), "IMAGE", {"detail": "low"}),
    ]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"data": b"<html>"}, MediaError),
        ({"data": png()[:40]}, MediaError),
        ({"data": png(200, 200)}, MediaTooLargeError),
        ({"url": "file:///etc/passwd"}, MediaForbiddenError),
        ({"url": "http://127.0.0.1:9/x.png"}, MediaForbiddenError),
        ({"url": "http://169.254.169.254/latest/meta-data"}, MediaForbiddenError),
        ({"data": b"RIFF", "modality": "AUDIO"}, MediaTypeError),
        ({"data": png(), "options": {"f": object()}}, EpdError),
    ],
)
async def test_what_may_not_be_read_is_an_error_that_names_it(images, bad, kind):
    with pytest.raises(kind, match=r"^image 2 of 2: "):
        await images.read([item(png()), item(number=1, **bad)], soon())


async def test_the_other_images_of_a_request_that_fails_are_gone_with_it(images):
    """Without waiting for a collection of cycles."""
    media = png()
    before = sys.getrefcount(media)
    gc.disable()
    try:
        reading = asyncio.create_task(images.read([item(media), item(b"<html>", number=1)], soon()))
        await asyncio.wait([reading])
        assert isinstance(reading.exception(), MediaError)
        del reading
        await until(lambda: sys.getrefcount(media) <= before)  # a thread lets go of it, too
    finally:
        gc.enable()


async def test_the_deadline_holds(images):
    with pytest.raises((DeadlineError, MediaError)):
        await images.read([item(url="http://192.0.2.1/x.png")], time.monotonic() - 1)


async def test_an_image_behind_a_url_is_compared_with_its_hash(images, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    images = LocalImages(
        "a/b/c",
        MediaLimits(allowed_local_root=tmp_path),
        fetched_bytes=1 << 28,
        decode_bytes=1 << 28,
    )
    url = f"file://{tmp_path}/a.png"
    right = f"sha256:{hashlib.sha256(png()).hexdigest()}"
    (found,) = await images.read([item(url=url, content_hash=right)], soon())
    assert found.key == embedding_key("a/b/c", digest(png()), "IMAGE", {})
    with pytest.raises(MediaError, match=r"^image 1 of 2: the content hash does not match"):
        await images.read([item(url=url, content_hash=f"sha256:{'0' * 64}")], soon())
    await images.close()


async def test_bytes_on_their_way_are_bounded_and_given_back():
    """By one image more than the bound at most, however many a request names."""
    body = encoded(Image.frombytes("RGB", (400, 300), random.Random(1).randbytes(360_000)))
    bound, held = 3 * len(body), []

    async def picture(_request: web.Request) -> web.StreamResponse:
        held.append(images._intake._bounds.nbytes)
        answer = web.StreamResponse()
        await answer.prepare(_request)
        for begin in range(0, len(body), 1 << 15):
            held.append(images._intake._bounds.nbytes)
            await answer.write(body[begin : begin + (1 << 15)])
            await asyncio.sleep(0.01)
        return answer

    app = web.Application()
    app.router.add_get("/{number}.png", picture)
    images = reader(local_limits(), bound)
    async with sites.up(app) as url:
        items = [item(url=f"{url}/{number}.png", number=number) for number in range(24)]
        found = await images.read(items, soon())
    assert len({one.key for one in found}) == 1
    assert len(body) < max(held) <= bound + len(body)
    assert images._intake._bounds.nbytes == 0
    await images.close()
