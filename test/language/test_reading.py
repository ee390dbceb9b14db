from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import time
from types import SimpleNamespace

import pytest
from PIL import Image

from sglang_epd.errors import MediaError
from sglang_epd.language import planner, reading
from sglang_epd.language.planner import entries, has_content_hashes, plan
from sglang_epd.media import digest

LARGE = os.urandom(reading.LARGE_BYTES)


@pytest.fixture(autouse=True)
def nothing_read():
    reading.forget()
    yield
    reading.forget()


def text(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def request(*images, **more) -> SimpleNamespace:
    values = {"image_data": list(images), "video_data": None, "audio_data": None}
    return SimpleNamespace(**{**values, **more})


async def read(asked, *, hashed=False) -> None:
    await reading.beforehand(entries(asked), hashed=hashed)


async def test_a_plan_is_the_same_whether_its_media_were_read_beforehand(monkeypatch):
    asked = request({"url": text(LARGE), "detail": "low"}, text(b"small"), "http://h/a.png")
    expected = plan(asked)
    await read(asked)
    monkeypatch.setattr(planner, "parse_source", None)  # it is not asked any more
    monkeypatch.setattr("sglang_epd.wire.http.blake3", None)
    items = plan(asked)
    assert items == expected
    assert [item.digest for item in items] == [digest(LARGE), digest(b"small"), b""]


async def test_what_several_entries_say_is_read_once():
    """SGLang makes an entry of its own for each question about an image."""
    said = text(LARGE)
    asked = request(SimpleNamespace(url=said), {"url": said, "detail": "low"}, said)
    await read(asked)
    first, *others = plan(asked)
    assert first.data == LARGE
    assert all(item.data is first.data for item in others)
    assert others[0].options == {"detail": "low"}


async def test_what_cannot_be_read_is_said_of_its_entry():
    asked = request(text(LARGE), "not base64!")
    await read(asked)
    for _ in range(2):  # each time that it is planned
        with pytest.raises(MediaError, match=r"^image 2 of 2: .*neither"):
            plan(asked)


async def test_content_hashes_are_compared_with_what_was_read(monkeypatch):
    right = f"sha256:{hashlib.sha256(LARGE).hexdigest()}"
    asked = request(text(LARGE), mm_content_hashes=[right])
    assert has_content_hashes(asked)
    await read(asked, hashed=True)
    monkeypatch.setattr("sglang_epd.media.source.hashlib", None)
    assert plan(asked)[0].data == LARGE
    asked.mm_content_hashes = [f"sha256:{'0' * 64}"]
    with pytest.raises(MediaError, match="does not match"):
        plan(asked)


async def test_another_entry_at_the_same_place_is_read_anew():
    asked = request(text(LARGE))
    await read(asked)
    known = reading._read.get()
    assert known is not None
    (found,) = known.values()
    other = text(b"other")
    known[id(other)] = found
    assert reading.find(other) is None
    assert plan(request(other))[0].data == b"other"


async def test_requests_read_at_a_time_do_not_find_each_others():
    first, second = request(text(LARGE)), request(text(LARGE[::-1]))

    async def one(mine, others):
        await read(mine)
        return reading.find(entries(mine)[0]), reading.find(entries(others)[0])

    for mine, others in await asyncio.gather(one(first, second), one(second, first)):
        assert mine is not None
        assert others is None
    assert reading.find(entries(first)[0]) is None


LARGE_TEXT = "x" * (reading.LARGE_BYTES + 1)


@pytest.mark.parametrize(
    ("images", "large"),
    [
        ([LARGE_TEXT], True),
        ([LARGE_TEXT.encode()], True),
        ([{"url": LARGE_TEXT}], True),
        ([SimpleNamespace(url=LARGE_TEXT)], True),
        ([Image.new("RGB", (1000, 1000))], True),
        (["x" * 40_000] * 27, True),
        (["x"] * (reading.MANY_ENTRIES + 1), True),
        (["x"] * reading.MANY_ENTRIES, False),
        (["http://h/a.png", Image.new("RGB", (100, 100)), 7], False),
    ],
    ids=range(9),
)
def test_what_is_large(images, large):
    assert reading.is_large(images) is large


async def test_the_event_loop_goes_on_while_media_are_read():
    """Compared with how long it stands still where they are read in it."""
    asked = request(*[text(os.urandom(16 << 20)) for _ in range(4)])

    async def longest_pause(work) -> float:
        pauses = [0.0]
        while not work.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - began)
        await work
        return max(pauses)

    async def in_the_loop():
        for item in plan(asked):
            item.digest  # noqa: B018 - hashed when it is asked for

    shares = []
    for _ in range(5):
        beside = await longest_pause(asyncio.create_task(read(asked)))
        reading.forget()
        within = await longest_pause(asyncio.create_task(in_the_loop()))
        shares.append(beside / within)
    assert min(shares) < 0.3, shares


async def test_a_request_that_leaves_meanwhile_leaves_nothing(monkeypatch):
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    parse = reading.parse_source
    seen = []

    def slow(entry, escapes):
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.2)
        seen.append(entry)
        return parse(entry, escapes)

    monkeypatch.setattr(reading, "parse_source", slow)
    waiting = asyncio.create_task(read(request(text(LARGE))))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert reading._read.get() is None
    monkeypatch.setattr(reading, "parse_source", parse)
    await read(asked := request(text(LARGE)))
    assert plan(asked)[0].data == LARGE


def test_escapes_are_counted_over_the_whole_request():
    few = "data:," + "%41" * 1000
    assert len(plan(request(*[few] * 4))) == 4
    with pytest.raises(MediaError, match=r"image 5 of 5: .*4096 percent escapes: use base64"):
        plan(request(*[few] * 5))


def test_hostile_escapes_cost_no_more_than_a_look():
    """36 MB of them, of which each URL alone would take 0.2 s to undo."""
    asked = request(*["data:," + "%41" * 499_999 for _ in range(24)])
    began = time.thread_time()
    with pytest.raises(MediaError, match="percent escapes"):
        plan(asked)
    assert time.thread_time() - began < 0.05
