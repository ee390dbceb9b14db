"""Pictures through real children."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from PIL import Image

from decoding import attacks
from decoding.conftest import Make
from decoding.trees import Watch
from media.samples import decode_image, encoded
from media.samples import picture as noise
from media.test_decode import SAMPLES
from sglang_epd.decoding import Decoders
from sglang_epd.decoding.decoders import _Child
from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaError,
    MediaTooLargeError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.media import MediaLimits
from waiting import reached

GOOD = encoded(noise(200, 150), "JPEG")
# Takes seconds.
SLOW = attacks.jpeg_2000(5000)
MARGIN = 64 << 20


def image(decoders: Decoders, data: bytes, seconds: float = 60.0) -> Image.Image:
    with decoders.begin(time.monotonic() + seconds) as item:
        return item.image(data)


def outcome(decoders: Decoders, data: bytes, seconds: float = 60.0) -> Image.Image | EpdError:
    try:
        return image(decoders, data, seconds)
    except EpdError as error:
        return error


def nothing_is_held(decoders: Decoders) -> bool:
    return decoders.budget.used == decoders.places.used == decoders.waiting == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_pixels_are_those_of_the_one_decoder(decoders: Decoders, name: str) -> None:
    expected = decode_image(SAMPLES[name], MediaLimits())
    made = image(decoders, SAMPLES[name])
    assert (made.mode, made.size) == ("RGB", expected.size)
    assert made.tobytes() == expected.tobytes()
    assert nothing_is_held(decoders)


def test_a_child_whose_pixels_cannot_be_mapped_draws_no_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next picture would be looked for where an earlier one is."""
    decoders = make()
    image(decoders, encoded(noise(20, 20), "PNG"))
    large, small = encoded(noise(300, 200), "PNG"), encoded(noise(20, 19), "PNG")

    def no_room(*_args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("sglang_epd.decoding.decoders.mmap.mmap", no_room)
        with pytest.raises(OSError, match="allocate"):
            image(decoders, large)
    assert image(decoders, small).tobytes() == decode_image(small, MediaLimits()).tobytes()
    assert nothing_is_held(decoders)


def test_one_picture_after_the_other_by_one_child(make: Make) -> None:
    decoders = make()
    sizes = [(200, 150), (30, 40), (400, 300), (401, 300), (20, 20)]
    files = [encoded(noise(*size), kind) for size in sizes for kind in ("PNG", "JPEG", "TIFF")]
    made = []
    for data in files:
        made.append(image(decoders, data))
        assert isinstance(outcome(decoders, data[: len(data) // 2]), MediaError)
    for data, one in zip(files, made, strict=True):
        assert one.tobytes() == decode_image(data, MediaLimits()).tobytes()
    assert len(decoders.pictures._idle) == 1


@pytest.mark.parametrize(
    ("data", "kind", "told"),
    [
        (b"", MediaError, "it is empty"),
        (b"<html>", MediaError, "HTML"),
        (GOOD[:300], MediaError, "truncated"),
        (attacks.png_header(30_000, 30_000), MediaTooLargeError, "900 megapixels"),
    ],
)
def test_errors_are_those_of_the_one_decoder(decoders, data, kind, told) -> None:
    with pytest.raises(MediaError, match=told) as caught:
        image(decoders, data)
    assert type(caught.value) is kind


def test_a_real_webp_of_a_camera_passes(decoders: Decoders) -> None:
    data = encoded(noise(4000, 3000), "WEBP", method=0)
    assert image(decoders, data).tobytes() == decode_image(data, MediaLimits()).tobytes()


LARGE = {
    "JPEG": {},
    "JPEG progressive": {"progressive": True},
    "PNG": {},
    "PNG animated": {"animated": True},
    "WEBP": {"method": 0},
    "WEBP lossless": {"lossless": True, "method": 0},
    "WEBP animated": {"animated": True, "method": 0},
    "GIF": {},
    "GIF animated": {"animated": True},
    "BMP": {},
    "TIFF": {"compression": "tiff_lzw"},
    "AVIF": {"speed": 10},
    "JPEG2000": {},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_pictures_of_all_formats_pass(decoders: Decoders, name: str) -> None:
    mode = "L" if name in ("BMP", "GIF", "GIF animated") else "RGB"
    data = attacks.picture(mode, name.split(maxsplit=1)[0], 6000, 4000, **LARGE[name])
    assert image(decoders, data).size == (6000, 4000)


def test_avif_on_a_host_of_many_cores(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pillow's decoder has a thread for each of them."""
    many = "import os\nos.sched_getaffinity = lambda pid: set(range(128))\n"
    (tmp_path / "sitecustomize.py").write_text(many)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert image(make(), encoded(noise(1000, 1000), "AVIF", speed=10)).size == (1000, 1000)


# Those that take most for their pixels on the way.
SMART = {
    "turned": ("RGB", "PNG", {"exif": 6}),
    "grey": ("LA", "PNG", {"exif": 6}),
    "webp": ("RGBA", "WEBP", {"exif": 6, "lossless": True, "method": 0}),
    "avif": ("RGBA", "AVIF", {"speed": 10}),
    "jpeg 2000": ("RGBA", "JPEG2000", {"quality_layers": [20]}),
}


@pytest.mark.parametrize("name", SMART)
def test_large_pictures_pass_when_turned_and_laid_over_a_background(
    decoders: Decoders, name: str
) -> None:
    mode, kind, options = SMART[name]
    if "exif" in options:
        exif = Image.Exif()
        exif[0x0112] = options["exif"]
        options = options | {"exif": exif}
    data = encoded(noise(5000, 4000).convert(mode), kind, **options)
    with decoders.begin(time.monotonic() + 100) as decoding:
        made = decoding.image(data, smart_rgb=True)
    assert made.tobytes() == decode_image(data, MediaLimits(), smart_rgb=True).tobytes()


def test_a_webp_is_judged_before_its_canvas_is_made(decoders: Decoders) -> None:
    data = bytearray(attacks.picture("RGB", "WEBP", 16, 16, lossless=True))
    at = data.index(b"VP8L") + 9
    data[at : at + 4] = (12_000 - 1 | 12_000 - 1 << 14).to_bytes(4, "little")
    with pytest.raises(MediaTooLargeError, match="144 megapixels, limit 100"):
        image(decoders, bytes(data))


def test_jpeg_2000_has_a_bound_of_its_own(decoders: Decoders) -> None:
    began = time.monotonic()
    with pytest.raises(MediaTooLargeError, match="100 megapixels, limit 25 for JPEG 2000"):
        image(decoders, attacks.jpeg_2000(10_000))
    assert time.monotonic() - began < 5


def test_a_small_picture_has_little_processor_time(make: Make) -> None:
    decoders = make()
    with pytest.raises(MediaError, match="crashed, or took too long"):
        image(decoders, attacks.trailing(3_000_000), 600)


def test_one_child_serves_one_item_after_the_other(make: Make) -> None:
    decoders = make()
    for _ in range(3):
        image(decoders, GOOD)
    (forker,) = psutil.Process().children()[-1:]
    assert len(forker.children()) == 1


@pytest.mark.parametrize("name", attacks.BOMBS)
def test_memory_stays_within_the_budget(make: Make, name: str) -> None:
    """Four at once, of which each alone takes more than a place has; a good one beside them."""
    budget, data = 400, attacks.bomb(name)
    decoders = make(budget_mb=budget, places=2)
    image(decoders, GOOD)
    with Watch()() as watch, ThreadPoolExecutor(5) as pool:
        bad = [pool.submit(outcome, decoders, data) for _ in range(4)]
        good = pool.submit(outcome, decoders, GOOD)
        assert isinstance(good.result(), Image.Image)
        found = [one.result() for one in bad]
    assert watch.grown < (budget << 20) + MARGIN
    if name in ("tiff tile", "png"):
        assert all(isinstance(one, MediaError) for one in found), found
    else:
        assert all(isinstance(one, Image.Image) for one in found), found
    assert nothing_is_held(decoders)


LARGEST = {"jpeg 2000": SLOW, "webp": attacks.canvas(10_000)}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_pictures_wait_for_one_another(make: Make, name: str) -> None:
    budget = 3500
    decoders = make(budget_mb=budget, places=4)
    image(decoders, GOOD)
    with Watch()() as watch, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: outcome(decoders, LARGEST[name], 600).size, range(3)))
    assert found[1:] == found[:-1]
    assert watch.grown < (budget << 20) + MARGIN
    assert nothing_is_held(decoders)


def test_what_takes_more_than_there_is_is_refused_at_once(make: Make) -> None:
    decoders, data = make(budget_mb=200), attacks.bomb("jpeg 2000")
    began = time.monotonic()
    with pytest.raises(MediaTooLargeError, match=r"takes \d+ MiB, .*SGLANG_EPD_DECODE_MB"):
        image(decoders, data)
    assert time.monotonic() - began < 5
    assert nothing_is_held(decoders)


def test_small_pictures_pass_large_ones_that_wait_for_memory(make: Make) -> None:
    decoders = make(budget_mb=400, places=2)
    data = attacks.bomb("jpeg 2000")
    with decoders.begin() as holder, ThreadPoolExecutor(8) as pool:
        holder.image(data)
        waiting = [pool.submit(outcome, decoders, data) for _ in range(4)]
        reached(lambda: decoders.waiting >= len(waiting))
        for _ in range(5):
            assert isinstance(outcome(decoders, GOOD, 30), Image.Image)
        assert not any(one.done() for one in waiting)
        holder.__exit__()
        assert all(isinstance(one.result(), Image.Image) for one in waiting)
    assert nothing_is_held(decoders)


def test_decoding_ends_at_the_deadline(make: Make) -> None:
    decoders = make()
    image(decoders, GOOD)
    with pytest.raises(DeadlineError):
        image(decoders, SLOW, 0.3)
    assert isinstance(outcome(decoders, GOOD), Image.Image)
    assert nothing_is_held(decoders)


def test_a_header_has_little_processor_time(make: Make) -> None:
    decoders = make()
    with pytest.raises(MediaError, match="crashed, or took too long"):
        image(decoders, attacks.filled(), 600)


def test_what_nobody_waits_for_is_ended(make: Make) -> None:
    decoders = make()
    image(decoders, GOOD)
    item = decoders.begin()
    found: list[BaseException] = []

    def decode() -> None:
        with pytest.raises(RequestCancelledError) as caught, item:
            item.image(SLOW)
        found.append(caught.value)

    thread = threading.Thread(target=decode)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    item.stop()
    thread.join()
    assert found
    assert time.monotonic() - began < 5
    assert nothing_is_held(decoders)


def test_what_waits_for_memory_can_be_stopped(make: Make) -> None:
    decoders = make(budget_mb=400)
    with decoders.begin() as holder, ThreadPoolExecutor(1) as pool:
        holder.image(attacks.bomb("jpeg 2000"))
        item = decoders.begin()

        def decode() -> None:
            with item:
                item.image(attacks.bomb("jpeg 2000"))

        waiting = pool.submit(decode)
        reached(lambda: decoders.waiting)
        item.stop()
        with pytest.raises(RequestCancelledError):
            waiting.result(30)
    assert nothing_is_held(decoders)


def test_a_deadline_that_has_passed_is_one(decoders: Decoders) -> None:
    with pytest.raises(DeadlineError):
        image(decoders, GOOD, -1.0)


def _children() -> list[psutil.Process]:
    return [child for forker in psutil.Process().children() for child in forker.children()]


def _ended(child: psutil.Process) -> bool:
    """Whether it runs no more; nobody may have reaped it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return child.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_child_that_is_struck_over_an_item_fails_that_item_alone(make: Make, blow: int) -> None:
    before = _children()
    decoders = make()
    image(decoders, GOOD)
    (child,) = [one for one in _children() if one not in before]
    used = sum(child.cpu_times()[:2])
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(outcome, decoders, SLOW, 3.0 if blow == signal.SIGSTOP else 60.0)
        reached(lambda: sum(child.cpu_times()[:2]) >= used + 0.1 or bad.done())
        os.kill(child.pid, blow)
        error = bad.result()
    assert isinstance(error, DeadlineError if blow == signal.SIGSTOP else MediaError)
    assert isinstance(outcome(decoders, GOOD), Image.Image)
    assert _ended(child)


def test_the_end_of_the_process_that_forks_is_no_items_fault(make: Make) -> None:
    decoders = make()
    image(decoders, GOOD)
    forker = decoders.pictures.nursery.pid
    assert forker is not None
    (child,) = psutil.Process(forker).children()
    used = sum(child.cpu_times()[:2])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(outcome, decoders, SLOW)
        reached(lambda: sum(child.cpu_times()[:2]) >= used + 0.1 or slow.done())
        os.kill(forker, signal.SIGKILL)
        assert isinstance(slow.result(), UnavailableError)
    assert isinstance(outcome(decoders, GOOD), Image.Image)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_idle_children_and_the_process_that_forks_them_may_be_struck(make: Make, blow) -> None:
    decoders = make()
    image(decoders, GOOD)
    forker = decoders.pictures.nursery.pid
    assert forker is not None
    idle = psutil.Process(forker).children()
    os.kill(forker, blow)
    if blow == signal.SIGKILL:
        reached(lambda: all(map(_ended, idle)))  # with it
    assert isinstance(outcome(decoders, GOOD), Image.Image)


def test_a_child_that_keeps_memory_is_replaced(make: Make, monkeypatch) -> None:
    decoders = make()
    image(decoders, GOOD)
    (before,) = [one.process.pid for one in decoders.pictures._idle]
    monkeypatch.setattr("sglang_epd.decoding.decoders._GROWN_BYTES", 0)
    image(decoders, encoded(noise(2000, 1500)))
    assert before not in [one.process.pid for one in decoders.pictures._idle]


def test_a_child_that_answers_out_of_turn_has_no_further_item(make: Make, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "processes"))
    decoders = make()
    image(decoders, GOOD)
    honest = decoders.pictures._idle[0].process
    liar = decoders.pictures.nursery.child("births:echo", {"name": "liar"})
    decoders.pictures._idle.append(_Child(liar))
    error = outcome(decoders, GOOD)
    assert isinstance(error, MediaError)
    assert "decoder crashed" in error.message
    assert [one.process for one in decoders.pictures._idle] == [honest]
    with pytest.raises(MediaError, match="its decoder is broken"):
        decoders.pictures._idle[0].pixels(-1, 4 * 200 * 150 + 1)
    assert isinstance(outcome(decoders, GOOD), Image.Image)
