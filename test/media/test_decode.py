"""`reference` below is what SGLang 0.5.23 does with an image's bytes on its PIL path:
`load_image` (srt/utils/common.py), then `_load_single_item` of the processors."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from media.samples import decode_image, encoded, picture
from packages import sglang_module
from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits

LIMITS = MediaLimits()


def reference(data: bytes) -> Image.Image:
    image = Image.open(BytesIO(data))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def png(width: int, height: int, *, body: bytes = b"") -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def transparent(kind: str) -> bytes:
    """A palette picture whose transparency is one number or, in a PNG, a whole table."""
    image = picture().convert("P")
    return encoded(image, kind, transparency=3)


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    return exif


def with_orientation(kind: str) -> bytes:
    return encoded(picture(), kind, exif=_turned())


def animation(kind: str) -> bytes:
    frames = [picture(mode="RGB").rotate(90 * turn) for turn in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


SAMPLES = {
    **{f"png-{mode}": encoded(picture(mode=mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "png-16bit": encoded(Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)),
    "png-interlaced": encoded(picture(), "PNG", interlace=True),
    "png-transparent-colour": encoded(picture(), "PNG", transparency=(1, 2, 3)),
    "png-transparent-palette": transparent("PNG"),
    "png-exif": with_orientation("PNG"),
    "apng": animation("PNG"),
    **{f"jpeg-{mode}": encoded(picture(mode=mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
    "jpeg-progressive": encoded(picture(), "JPEG", progressive=True),
    "jpeg-exif": with_orientation("JPEG"),
    "mpo": animation("MPO"),
    "webp": encoded(picture(), "WEBP"),
    "webp-alpha": encoded(picture(mode="RGBA"), "WEBP", lossless=True),
    "webp-exif": with_orientation("WEBP"),
    "webp-animation": animation("WEBP"),
    "gif": encoded(picture(mode="P"), "GIF"),
    "gif-transparent": transparent("GIF"),
    "gif-animation": animation("GIF"),
    **{
        f"bmp-{mode}": encoded(picture(mode=mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")
    },
    **{
        f"tiff-{mode}": encoded(picture(mode=mode), "TIFF") for mode in ("L", "RGB", "RGBA", "CMYK")
    },
    "tiff-lzw": encoded(picture(), "TIFF", compression="tiff_lzw"),
    "tiff-exif": with_orientation("TIFF"),
    "avif": encoded(picture(), "AVIF"),
    "jpeg2000": encoded(picture(), "JPEG2000"),
}


def see_through(edge: tuple[int, ...], mode: str = "RGBA", kind: str = "PNG") -> bytes:
    """A picture of every alpha, which is opaque along its edges, or transparent there."""
    image = picture(100, 60, "RGBA")
    edges = Image.new("RGBA", image.size, edge)
    edges.paste(image.crop((1, 1, 99, 59)), (1, 1))
    return encoded(edges.convert(mode), kind, **({"lossless": True} if kind == "WEBP" else {}))


SEE_THROUGH = {
    "bright": see_through((250, 240, 230, 255)),
    "dark": see_through((5, 6, 7, 255)),
    "between": see_through((128, 128, 128, 129)),
    "hidden": see_through((250, 240, 230, 128)),
    "grey": see_through((200, 200, 200, 255), "LA"),
    "webp": see_through((250, 240, 230, 255), kind="WEBP"),
    "one-pixel": encoded(Image.new("RGBA", (1, 1), (200, 9, 9, 200))),
    "turned": encoded(picture(mode="RGBA"), exif=_turned()),
}


@pytest.mark.parametrize("name", [*SAMPLES, *SEE_THROUGH])
def test_pixels_of_smart_rgb_conversion(name: str) -> None:
    data = (SAMPLES | SEE_THROUGH)[name]
    with Image.open(BytesIO(data)) as opened:
        expected = sglang_module("utils.common").smart_to_rgb(opened)
    image = decode_image(data, LIMITS, smart_rgb=True)
    assert (image.mode, image.size) == ("RGB", expected.size)
    assert image.tobytes() == expected.tobytes()
    if name in SEE_THROUGH:
        assert image.tobytes() != decode_image(data, LIMITS).tobytes()


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # from the reference
def test_pixels_are_those_that_sglang_makes(name: str) -> None:
    expected = reference(SAMPLES[name])
    image = decode_image(SAMPLES[name], LIMITS)
    assert (image.mode, image.size) == ("RGB", expected.size)
    assert image.tobytes() == expected.tobytes()


def test_a_palette_with_a_table_of_alphas_raises_no_warning() -> None:
    image = picture(mode="P")
    data = encoded(image, "PNG", transparency=bytes(range(256)))
    assert decode_image(data, LIMITS).tobytes() == image.convert("RGB").tobytes()


def test_alpha_is_dropped_and_orientation_not_applied() -> None:
    """Surprising, but so it is with SGLang; a model must get the same pixels here."""
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    assert decode_image(encoded(clear), LIMITS).getpixel((0, 0)) == (10, 20, 30)
    assert decode_image(SAMPLES["jpeg-exif"], LIMITS).size == (40, 30)
    assert decode_image(SAMPLES["tiff-exif"], LIMITS).size == (30, 40)  # Pillow itself does that


def test_a_huge_header_is_refused_before_any_pixel() -> None:
    data = png(30_000, 30_000, body=zlib.compress(bytes(30_000)))
    tracemalloc.start()
    begin = time.thread_time()
    with pytest.raises(
        MediaTooLargeError,
        match=r"^image is 30000 x 30000 px = 900 megapixels, limit 100$",
    ) as caught:
        decode_image(data, LIMITS)
    assert time.thread_time() - begin < 0.1
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert caught.value.status == 413


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_the_pixel_bound_is_exact(kind: str) -> None:
    data = encoded(picture(40, 30), kind)
    assert decode_image(data, MediaLimits(max_pixels=1200)).size == (40, 30)
    with pytest.raises(MediaTooLargeError, match="40 x 30"):
        decode_image(data, MediaLimits(max_pixels=1199))


def test_more_pixels_than_pillow_likes_are_allowed_where_the_limit_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Image.open would warn first (an error in this suite), then refuse."""
    for maximum in (1000, 100):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", maximum)
        assert decode_image(SAMPLES["png-RGB"], LIMITS).size == (40, 30)


def test_the_byte_bound() -> None:
    data = SAMPLES["png-RGB"]
    assert decode_image(data, MediaLimits(max_bytes=len(data)))
    with pytest.raises(MediaTooLargeError, match="bytes"):
        decode_image(data, MediaLimits(max_bytes=len(data) - 1))


def gif_with_a_huge_frame() -> bytes:
    """A screen of 1 x 1 whose first frame is 60000 x 60000."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0)
    return screen + frame + b"\x02\x02\x44\x01\x00;"


def test_a_frame_larger_than_its_screen_counts() -> None:
    with pytest.raises(MediaTooLargeError):
        decode_image(gif_with_a_huge_frame(), LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000"])
def test_truncated_images_say_so(kind: str) -> None:
    data = encoded(picture(200, 150), kind)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(MediaError, match=f"^{kind} image is .*truncated"):
            decode_image(data[: int(len(data) * part)], LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image: it is empty"),
        (b"this is not a picture\n", "not an image: it is text"),
        (b'{"error": "expired"}', "not an image: it is text"),
        (b"\n<!DOCTYPE html><html>", "not an image: it is an HTML page"),
        (b"<?xml version='1.0'?>\n<svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "video"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIF"),
        (b"\0\1\2\3", "not an image: its format is none of"),
        (b"\xff\xfe", "not an image: its format is none of"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # Ghostscript
        (b"P6 9 9 65535\n" + bytes(486), "not an image"),
        (encoded(picture(), "ICO"), "not an image"),
        (png(0, 7), "damaged|empty"),
        (b"\x89PNG\r\n\x1a\n", "PNG image is damaged or truncated"),
    ],
)
def test_what_is_no_image_is_called_by_its_name(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        decode_image(data, LIMITS)
    assert caught.value.status == 400


def test_formats_decoded_in_python_are_refused() -> None:
    """A run-length-coded BMP: its decoder holds the GIL for seconds a hundred megabytes."""
    header = struct.pack("<IiiHHIIiiII", 40, 4, 4, 1, 8, 1, 8, 0, 0, 256, 0)
    start = struct.pack("<2sIHHI", b"BM", 14 + 40 + 1024 + 8, 0, 0, 14 + 40 + 1024)
    with pytest.raises(MediaError, match="compression that is not read"):
        decode_image(start + header + bytes(1024) + b"\4\1\0\0\4\2\0\1", LIMITS)


def jpeg_with_scans(scans: int) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    data = encoded(picture(16, 16, "L"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    with pytest.raises(MediaError, match="more than 100 scans"):
        decode_image(jpeg_with_scans(200), LIMITS)


def test_what_follows_a_jpeg_is_not_counted_as_scans() -> None:
    """Phones append a video to their photographs."""
    data = SAMPLES["jpeg-progressive"] + b"\xff\xda\0\0" * 1000
    assert decode_image(data, LIMITS).size == (40, 30)


def test_scans_do_not_hide_behind_a_marker_without_a_length() -> None:
    data = jpeg_with_scans(200)
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    with pytest.raises(MediaError, match="more than 100 scans"):
        decode_image(data[:second] + b"\xff\x01\xff\xff" + data[second:], LIMITS)


def test_data_in_many_pieces_is_no_such_file() -> None:
    """libpng writes its data in pieces of 8 KiB, other encoders in smaller ones."""
    data = encoded(picture(1000, 700), "PNG", compress_level=0)
    start, end = data.index(b"IDAT") - 4, data.rindex(b"IEND") - 4
    image = Image.open(BytesIO(data))
    stream = zlib.compress(b"".join(b"\0" + row.tobytes() for row in np.asarray(image)), 0)
    pieces = [b"IDAT" + stream[i : i + 1024] for i in range(0, len(stream), 1024)]
    body = b"".join(
        (len(piece) - 4).to_bytes(4) + piece + zlib.crc32(piece).to_bytes(4) for piece in pieces
    )
    assert decode_image(data[:start] + body + data[end:], LIMITS).tobytes() == image.tobytes()


def test_errors_do_not_quote_the_media() -> None:
    data = SAMPLES["png-RGB"].replace(b"IDAT", b"SeCr")
    with pytest.raises(MediaError) as caught:
        decode_image(data, LIMITS)
    assert "SeCr" not in caught.value.message


def test_threads_do_not_disturb_each_other() -> None:
    small = MediaLimits(max_pixels=100)
    names = list(SAMPLES) * 4
    expected = {name: decode_image(data, LIMITS).tobytes() for name, data in SAMPLES.items()}

    def decode(name: str) -> bytes:
        with pytest.raises(MediaError):
            decode_image(SAMPLES[name], small)
        return decode_image(SAMPLES[name], LIMITS).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(decode, names)) == [expected[name] for name in names]


def decodes_or_explains(data: bytes) -> None:
    try:
        image = decode_image(data, MediaLimits(max_pixels=100_000))
    except MediaError as error:
        assert len(error.message) < 150
    else:
        assert image.mode == "RGB"
        assert image.width * image.height <= 100_000


MAGICS = st.sampled_from(
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        b"\xff\xd8\xff",
        b"RIFF\x24\0\0\0WEBPVP8 ",
        b"GIF89a",
        b"BM",
        b"II*\0\x08\0\0\0",
        b"MM\0*\0\0\0\x08",
        b"\0\0\0\x1cftypavif",
        b"\xff\x4f\xff\x51",
        b"\0\0\0\x0cjP  \r\n\x87\n",
        b"",
    ]
)


@given(MAGICS, st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_media_errors(magic: bytes, rest: bytes) -> None:
    decodes_or_explains(magic + rest)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_damaged_files_raise_nothing_but_media_errors(name: str, draw: st.DataObject) -> None:
    data = bytearray(SAMPLES[name])
    for _ in range(draw.draw(st.integers(1, 4))):
        # Most of what can go wrong is in the first bytes.
        place = draw.draw(st.one_of(st.integers(0, 60), st.integers(0, len(data) - 1)))
        data[place % len(data)] = draw.draw(st.integers(0, 255))
    decodes_or_explains(bytes(data))
    decodes_or_explains(bytes(data[: draw.draw(st.integers(0, len(data)))]))
