from __future__ import annotations

import pytest

from media.samples import encoded, picture
from sglang_epd.encoder.pipeline.claims import SMALL_PIXELS, claimed_pixels


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
