from __future__ import annotations

import struct
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from media.samples import decode_image, encoded, picture
from sglang_epd.media import MediaLimits, image_size
from sglang_epd.media.size import SMALL_PIXELS, claimed_pixels

FORMATS = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"exif": b"Exif\0\0" + bytes(60_000), "icc_profile": bytes(200_000)}),
    ("PNG", {}),
    ("GIF", {}),
    ("BMP", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"exif": b"Exif\0\0II*\0" + bytes(20)}),
    ("JPEG2000", {}),
    ("JPEG2000", {"no_jp2": True}),
]


@pytest.mark.parametrize(("kind", "options"), FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (301, 7), (1, 999)])
def test_it_is_what_pillow_says(kind, options, size):
    assert image_size(encoded(picture(*size), kind, **options)) == size


def test_a_bitmap_that_goes_from_top_to_bottom():
    data = bytearray(encoded(picture(6, 4), "BMP"))
    data[22:26] = struct.pack("<i", -4)
    assert image_size(bytes(data)) == (6, 4)


def test_a_jpeg_2000_that_begins_elsewhere_on_its_canvas():
    data = bytearray(encoded(picture(40, 30), "JPEG2000", no_jp2=True))
    for at, value in ((8, 140), (12, 230), (16, 100), (20, 200)):
        data[at : at + 4] = struct.pack(">I", value)
    assert image_size(bytes(data)) == (40, 30)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_png_that_claims_two_sizes_has_none():
    data = encoded(picture(40, 30))
    small = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    both = data[:8] + small + data[8:]
    assert decode_image(both, MediaLimits()).size == (40, 30)
    assert image_size(both) is None


def test_a_gif_counts_by_its_frame_where_that_passes_the_edges():
    data = bytearray(encoded(picture(40, 30), "GIF", comment=b",!" * 200))
    data[6:10] = struct.pack("<HH", 1, 1)
    assert decode_image(bytes(data), MediaLimits()).size == (40, 30)
    assert image_size(bytes(data)) == (40, 30)


def test_a_jpeg_2000_counts_by_the_stream_that_is_decoded():
    data = encoded(picture(40, 30), "JPEG2000")
    other = encoded(picture(1, 1), "JPEG2000", no_jp2=True)
    at = data.index(b"jp2c") - 4
    box = struct.pack(">I", 8 + len(other)) + b"uuid" + other
    both = data[:at] + box + data[at:]
    assert decode_image(both, MediaLimits()).size == (40, 30)
    assert image_size(both) == (40, 30)


def test_a_bitmap_of_os2_has_no_size_here():
    header = struct.pack("<IHHHH", 12, 4, 3, 1, 24)
    data = b"BM" + struct.pack("<IHHI", 62, 0, 0, 26) + header + bytes(36)
    assert decode_image(data, MediaLimits()).size == (4, 3)
    assert image_size(data) is None


@pytest.mark.parametrize("kind", ["TIFF", "PPM"])
def test_other_formats_have_no_size_here(kind):
    assert image_size(encoded(picture(), kind)) is None


@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_a_file_cut_anywhere_has_its_size_or_none(kind, options):
    data = encoded(picture(40, 30), kind, **options)
    sizes = {image_size(data[:length]) for length in range(min(len(data), 2000))}
    assert sizes <= {None, (40, 30)}


@given(st.sampled_from(FORMATS), st.data())
def test_damaged_headers_raise_nothing(chosen, draw):
    kind, options = chosen
    data = bytearray(encoded(picture(9, 5), kind, **options))
    for _ in range(draw.draw(st.integers(1, 8))):
        data[draw.draw(st.integers(0, min(len(data) - 1, 64)))] = draw.draw(st.integers(0, 255))
    size = image_size(bytes(data))
    assert size is None or min(size) > 0


@given(st.binary(max_size=200))
def test_garbage_raises_nothing(data):
    for magic in (
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF1234WEBPVP8 ",
        b"GIF89a",
        b"BM",
    ):
        size = image_size(magic + data)
        assert size is None or min(size) > 0


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff" + b"\xff" * (8 << 20),
        b"\xff\xd8" + b"\xff\xe1\x00\x02" * (1 << 20),
        b"\xff\xd8" + b"\xff\xe1\xff\xff" + bytes(8 << 20),
        b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", b"") * (1 << 19),
        b"GIF89a" + bytes(7) + b"!\xfe" + b"\1\0" * (4 << 20),
        b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0\0\0\x08uuid" * (1 << 20),
    ],
    ids=["filling", "empty segments", "a large one", "chunks", "comments", "boxes"],
)
def test_a_hostile_header_takes_no_time(data):
    begin = time.thread_time()
    assert image_size(data) is None
    assert time.thread_time() - begin < 0.02


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "JPEG2000"])
def test_a_picture_counts_by_its_pixels_not_by_its_bytes(kind):
    data = encoded(picture(300, 200).quantize(2).convert("RGB"), kind)
    assert claimed_pixels("IMAGE", data) == max(300 * 200, len(data))


def test_a_hundred_megapixels_in_a_kilobyte_are_large():
    header = bytearray(encoded(picture(8, 8), "JPEG2000", no_jp2=True))
    for at in (8, 12):
        header[at : at + 4] = (10_000).to_bytes(4, "big")
    assert len(header) < 1024
    assert claimed_pixels("IMAGE", bytes(header)) == 100_000_000


@pytest.mark.parametrize(
    ("modality", "data"),
    [
        ("IMAGE", b"nobody knows"),
        ("IMAGE", encoded(picture(8, 8), "TIFF")),  # its tiles may be of any size
        ("IMAGE", encoded(picture(8, 8)) + bytes(SMALL_PIXELS)),
        ("VIDEO", b"short"),
    ],
)
def test_what_may_be_anything_is_large(modality, data):
    assert claimed_pixels(modality, data) > SMALL_PIXELS


def test_a_clip_of_some_seconds_is_small():
    assert claimed_pixels("AUDIO", bytes(320_000)) < SMALL_PIXELS
    assert claimed_pixels("AUDIO", b"") == 1
