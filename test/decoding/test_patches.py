"""Patches through real children; their values are those of test/encoder/model/test_patches.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from decoding import attacks
from decoding.test_pictures import GOOD, LARGE, MARGIN, SLOW, image, nothing_is_held
from decoding.trees import Watch
from media.samples import decode_image, encoded
from media.samples import picture as noise
from sglang_epd.decoding import Decoders
from sglang_epd.decoding.messages import Cut
from sglang_epd.errors import DeadlineError, EpdError, MediaError
from sglang_epd.media import MediaLimits

CUT = Cut(16, 2, 65_536, 16_777_216)


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(MediaLimits(), 2 << 30, 2, cuts=True)
    yield decoders
    decoders.close()


def patches(decoders: Decoders, data: bytes, seconds: float = 300.0) -> np.ndarray:
    with decoders.begin(time.monotonic() + seconds) as item:
        return item.patches(data, CUT)[0]


def outcome(decoders: Decoders, data: bytes) -> np.ndarray | EpdError:
    try:
        return patches(decoders, data)
    except EpdError as error:
        return error


def children(decoders: Decoders) -> list[psutil.Process]:
    forker = psutil.Process(decoders.pictures.nursery.pid)
    return [forker, *forker.children()]


def test_no_process_that_forks_or_is_forked_has_a_second_thread(decoders: Decoders) -> None:
    for size in ((448, 448), (1000, 700)):
        patches(decoders, encoded(noise(*size), "JPEG"))
    assert [one.num_threads() for one in children(decoders)] == [1, 1]


def test_patches_and_pictures_follow_one_another(decoders: Decoders) -> None:
    sizes = [(448, 448), (64, 900), (30, 40), (900, 64), (1200, 800), (20, 20)]
    files = [encoded(noise(*size), kind) for size in sizes for kind in ("PNG", "JPEG", "TIFF")]
    alone = [patches(decoders, data) for data in files]
    for data, expected in zip(files, alone, strict=True):
        assert image(decoders, data).tobytes() == decode_image(data, MediaLimits()).tobytes()
        assert isinstance(outcome(decoders, data[: len(data) // 2]), MediaError)
        assert np.array_equal(patches(decoders, data), expected)
    assert len(children(decoders)) == 2
    assert nothing_is_held(decoders)


# test_pictures has large ones of all formats, test/encoder/model/test_patches.py cuts small ones.
@pytest.mark.parametrize("name", ["JPEG", "PNG animated", "WEBP", "GIF", "TIFF"])
def test_large_pictures_are_cut(decoders: Decoders, name: str) -> None:
    mode = "L" if name in ("BMP", "GIF", "GIF animated") else "RGB"
    data = attacks.picture(mode, name.split(maxsplit=1)[0], 6000, 4000, **LARGE[name])
    made = patches(decoders, data)
    assert made.nbytes == 3 * np.prod(CUT.resized(6000, 4000))
    colours = made.reshape(-1, 3, CUT.patch**2)
    assert np.ptp(colours, axis=(0, 2)).max() <= 8  # of one colour, but for WebP's noise
    assert colours[0, 0, 0] > 0


def test_a_picture_that_is_made_larger_has_memory_for_it(decoders: Decoders) -> None:
    cut = Cut(16, 2, 16_000_000, 16_777_216)
    with decoders.begin(time.monotonic() + 300) as item:
        made, _ = item.patches(GOOD, cut)
        assert made.nbytes == 3 * np.prod(cut.resized(200, 150))
    assert nothing_is_held(decoders)


@pytest.mark.parametrize("name", ["jpeg 2000 with alpha", "webp animation"])
def test_memory_stays_within_the_budget(name: str) -> None:
    decoders = Decoders(MediaLimits(), 400 << 20, 2, cuts=True)
    try:
        patches(decoders, GOOD)
        data = attacks.bomb(name)
        with Watch()() as watch, ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: outcome(decoders, data), range(4)))
        assert all(isinstance(one, np.ndarray) for one in found), found
        assert watch.grown < (400 << 20) + MARGIN
        assert nothing_is_held(decoders)
    finally:
        decoders.close()


def test_a_picture_that_no_tower_takes_is_refused_before_it_is_decoded(decoders: Decoders) -> None:
    began = time.process_time()
    with pytest.raises(MediaError, match="aspect ratio must be smaller than 200, got 250"):
        patches(decoders, encoded(noise(4, 1000)))
    assert time.process_time() - began < 5
    assert nothing_is_held(decoders)


def test_cutting_ends_at_the_deadline(decoders: Decoders) -> None:
    patches(decoders, GOOD)
    with pytest.raises(DeadlineError):
        patches(decoders, SLOW, 0.3)
    assert isinstance(outcome(decoders, GOOD), np.ndarray)
    assert nothing_is_held(decoders)
