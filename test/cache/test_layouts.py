from __future__ import annotations

import pytest

from sglang_epd.cache import LayoutCache
from sglang_epd.wire.messages import Layout, TensorSpec


def layout(rows: int, times: int = 0) -> Layout:
    extra = {"video_timestamps": [[float(n) for n in range(times)]]} if times else {}
    return Layout("IMAGE", TensorSpec("float32", (rows, 4)), [[1, 1, rows]], extra)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_was_added_is_found_and_the_first_stays():
    cache = LayoutCache()
    cache.add(key(1), layout(3))
    cache.add(key(1), layout(4))
    assert cache.find(key(1)) == layout(3)
    assert cache.find(key(2)) is None
    assert len(cache) == 1


def test_the_least_recently_used_goes_first():
    cache = LayoutCache(max_entries=3)
    for number in range(3):
        cache.add(key(number), layout(1))
    cache.find(key(0))
    cache.add(key(1), layout(1))
    cache.add(key(3), layout(1))
    assert [n for n in range(4) if cache.find(key(n))] == [0, 1, 3]


@pytest.mark.parametrize(("times", "count"), [(0, 3000), (10_000, 60)])
def test_its_bytes_are_bounded(times, count):
    bound = 200_000
    cache = LayoutCache(max_bytes=bound)
    for number in range(count):
        cache.add(key(number), layout(1, times))
        assert cache.nbytes <= bound
    assert 0 < len(cache) < count
    assert cache.find(key(count - 1)) is not None


def test_one_that_is_too_large_is_not_kept():
    cache = LayoutCache(max_bytes=1000)
    cache.add(key(0), layout(1, 10_000))
    assert (len(cache), cache.nbytes) == (0, 0)
