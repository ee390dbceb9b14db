from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from media.samples import encoded, picture
from sglang_epd.dispatch.work import Costs, describe
from sglang_epd.wire.http import EncodeItem, ItemLayout
from sglang_epd.wire.messages import Layout, TensorSpec

URL = "https://example.org/a.jpg"


def image(data=None, url=None, modality="IMAGE", **options):
    if data is None and url is None:
        data = encoded(picture(280, 140))
    return EncodeItem(0, modality, "image 1", data=data, url=url, options=options)


def header(width, height):
    """All of a PNG that is looked at."""
    size = struct.pack(">I4sII9x", 13, b"IHDR", width, height)
    return b"\x89PNG\r\n\x1a\n" + size + struct.pack(">I4s", 0, b"IDAT")


def told(*grid, modality="IMAGE"):
    return ItemLayout(bytes(32), Layout(modality, TensorSpec("float32", (1, 1)), [list(grid)]))


def key(item):
    return describe([item], Costs())[0].key


def test_a_picture_costs_its_patches_within_bounds():
    pictures = [encoded(picture(1400, 700), "JPEG"), encoded(picture(2, 2))]
    headers = [header(14 * 3, 14), header(0x7FFFFFFF, 0x7FFFFFFF)]
    works = describe([image(data) for data in pictures + headers], Costs())
    assert [work.patches for work in works] == [5000, 1, 3, 65_536]


def test_the_key_is_of_all_that_the_embedding_depends_on():
    data, other = encoded(picture(8, 8)), encoded(picture(9, 8))
    distinct = [
        image(data),
        image(other),
        image(data, detail="low"),
        image(data, detail="high"),
        image(data, modality="VIDEO"),
        image(url=URL),
        image(url=URL + "?2"),
        image(URL.encode()),
    ]
    assert len({key(item) for item in distinct}) == len(distinct)
    again = EncodeItem(7, "IMAGE", "image 8 of 9", data=bytes(bytearray(data)))
    assert key(again) == key(image(data)), "not of its place in the request"
    assert key(image(data, a=1, b=2)) == key(image(data, b=2, a=1))
    assert len(key(image(data))) == 32


def test_options_that_are_no_plain_data_raise_nothing():
    loop: dict = {}
    loop["self"] = loop
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for options in ({"x": b"\0"}, {"x": loop}, {"x": {1: 2, "a": 3}}, {"x": deep}, {"x": "\ud800"}):
        assert len(key(image(b"x", **options))) == 32
    assert len(key(image(url="http://\ud800/"))) == 32


@given(st.binary(max_size=300), st.sampled_from(["IMAGE", "VIDEO", "AUDIO"]))
def test_garbage_has_a_key_and_a_cost(data, modality):
    (work,) = describe([image(data, modality=modality)], Costs())
    assert len(work.key) == 32
    assert work.patches >= 1


@pytest.mark.parametrize("modality", ["IMAGE", "VIDEO", "AUDIO"])
def test_what_cannot_be_known_is_the_mean_of_the_past(modality):
    costs = Costs()
    unknown = image(url=URL, modality=modality)
    start = costs.estimate(unknown)
    costs.learn(unknown, told(1, 20, 20, modality=modality))
    assert min(start, 400) < costs.estimate(unknown) < max(start, 400)
    for _ in range(200):
        costs.learn(unknown, told(1, 20, 20, modality=modality))
    assert costs.estimate(unknown) == pytest.approx(400, rel=0.01)
    others = {"IMAGE", "VIDEO", "AUDIO"} - {modality}
    for other in others:
        item = image(url=URL, modality=other)
        assert costs.estimate(item) == Costs().estimate(item)


def test_how_far_the_processor_shrinks_pictures_is_learnt():
    costs = Costs()
    large, small = header(2000, 2000), header(448, 448)
    costs.learn(image(large), told(1, 70, 70))
    assert costs.estimate(image(large)) == 4900
    assert costs.estimate(image(small)) == 1024
    # As after a restart of the encoders with another bound.
    costs.learn(image(large), told(1, 100, 100))
    assert costs.estimate(image(large)) == 10_000


@pytest.mark.parametrize(("width", "grid"), [(448, (1, 28, 28)), (40, (1, 2, 2)), (20, (1, 4, 4))])
def test_larger_patches_and_rounding_are_not_taken_for_shrinking(width, grid):
    costs = Costs()
    costs.learn(image(header(width, width)), told(*grid))
    assert costs.estimate(image(header(1400, 1400))) == 10_000


def test_one_hostile_layout_moves_no_estimate_out_of_bounds():
    costs = Costs()
    costs.learn(image(url=URL), told(1 << 13, 1 << 13))
    assert costs.estimate(image(url=URL)) < 1 << 20
    costs.learn(image(header(14, 14)), told(1 << 13, 1 << 13))
    assert costs.estimate(image(header(14, 14))) == 1
