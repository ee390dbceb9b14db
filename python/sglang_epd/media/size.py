"""An image's width and height, read from its first bytes, and the cost of decoding an item, in
pixels, for the queue of an encoder.

For estimates: it looks at a few numbers, decodes nothing, allocates nothing, and takes
microseconds for any input. `decode.open_image` decides what an image is.
"""

from __future__ import annotations

from typing import Literal

from sglang_epd.modality import IMAGE, VIDEO

# Segments of a JPEG before its frame header: cameras write ten, profiles and
# thumbnails of some megabytes a few dozen.
_MAX_JPEG_SEGMENTS = 256
# A PNG's chunks before its pixels, and the boxes of a JPEG 2000 before its codestream.
_MAX_CHUNKS = 64
# Of comments and other extensions before a GIF's first frame.
_MAX_GIF_BLOCKS = 1024
# With sizes of four bytes; OS/2's are of two.
_BMP_HEADER_BYTES = 16
_JPEG_2000_BOX = b"\0\0\0\x0cjP  \r\n\x87\n"
_JPEG_2000_STREAM = b"\xff\x4f\xff\x51"
# Start-of-frame markers: 0xC0 to 0xCF but for tables (DHT, JPG, DAC).
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Takes a fraction of a second to decode, in whatever format.
SMALL_PIXELS = 4 << 20
# A picture whose header is not read here may be anything.
_UNKNOWN_PIXELS = 4 * SMALL_PIXELS
_VIDEO_PIXELS_A_BYTE = 64


def image_size(data: bytes) -> tuple[int, int] | None:
    """Width and height that a JPEG, PNG, WebP, GIF, BMP or JPEG 2000 file claims.

    Returns:
        None for any other format, and for a file that is cut off, claims no size, or claims
        more than one.
    """
    size = None
    if data.startswith(b"\xff\xd8\xff"):
        size = _jpeg(data)
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        size = _png(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        size = _webp(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        size = _gif(data)
    elif data.startswith(b"BM") and _number(data, 14, 4) >= _BMP_HEADER_BYTES:
        # A negative height says that rows go from top to bottom.
        size = _number(data, 18, 4), abs(_number(data, 22, 4, signed=True))
    elif data.startswith((_JPEG_2000_BOX, _JPEG_2000_STREAM)):
        size = _jpeg_2000(data)
    return size if size and min(size) > 0 else None


def _number(
    data: bytes,
    at: int,
    width: int,
    order: Literal["little", "big"] = "little",
    *,
    signed: bool = False,
) -> int:
    """A number at a place, 0 where the file ends before it does."""
    digits = data[at : at + width]
    return int.from_bytes(digits, order, signed=signed) if len(digits) == width else 0


def _jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if data[at : at + 1] != b"\xff":
            return None
        marker = _number(data, at + 1, 1)
        if marker == 0xFF:  # filling
            at += 1
            continue
        if marker in _JPEG_FRAMES:
            return _number(data, at + 7, 2, "big"), _number(data, at + 5, 2, "big")
        length = _number(data, at + 2, 2, "big")
        if length < 2:
            return None
        at += 2 + length
    return None


def _png(data: bytes) -> tuple[int, int] | None:
    size, at = None, 8
    for _ in range(_MAX_CHUNKS):
        kind = data[at + 4 : at + 8]
        if kind == b"IDAT":
            return size
        if kind == b"IHDR":
            if size:
                return None
            size = _number(data, at + 8, 4, "big"), _number(data, at + 12, 4, "big")
        at += 12 + _number(data, at, 4, "big")
    return None


def _gif(data: bytes) -> tuple[int, int] | None:
    """Of the screen and its first frame, which may pass the edges."""
    flags = _number(data, 10, 1)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    extension = False
    for _ in range(_MAX_GIF_BLOCKS):
        block = data[at : at + 1]
        if extension:
            length = _number(data, at, 1)
            at, extension = at + 1 + length, length > 0
        elif block == b"!":
            at, extension = at + 2, True
        elif block == b",":
            left, top, width, height = (_number(data, at + place, 2) for place in (1, 3, 5, 7))
            return max(_number(data, 6, 2), left + width), max(_number(data, 8, 2), top + height)
        else:
            return None
    return None


def _jpeg_2000(data: bytes) -> tuple[int, int] | None:
    """Size of the codestream, which is decoded, rather than of the file around it."""
    at = 0
    if data.startswith(_JPEG_2000_BOX):
        for _ in range(_MAX_CHUNKS):
            length, kind = _number(data, at, 4, "big"), data[at + 4 : at + 8]
            head = 16 if length == 1 else 8
            if kind == b"jp2c":
                break
            if length == 1:
                length = _number(data, at + 8, 8, "big")
            if length < head:
                return None
            at += length
        at += head
    if not data.startswith(_JPEG_2000_STREAM, at):
        return None
    right, bottom, left, top = (_number(data, at + place, 4, "big") for place in (8, 12, 16, 20))
    return max(right - left, 0), max(bottom - top, 0)


def _webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return _number(data, 26, 2) & 0x3FFF, _number(data, 28, 2) & 0x3FFF
    if kind == b"VP8L" and data[20:21] == b"\x2f" and len(data) >= 25:
        both = _number(data, 21, 4)
        return 1 + (both & 0x3FFF), 1 + (both >> 14 & 0x3FFF)
    if kind == b"VP8X" and len(data) >= 30:
        return 1 + _number(data, 24, 3), 1 + _number(data, 27, 3)
    return None


def claimed_pixels(modality: str, data: bytes) -> int:
    """What decoding an item costs, as far as can be told in microseconds; at least 1.

    In pixels, because decoding costs by pixels: a picture of 100 megapixels may be a kilobyte
    long. It is an estimate for who goes first, not a limit: decoding has its own.

    Args:
        modality: a name of `modality.MODALITIES`.
        data: the encoded media.
    """
    if modality == IMAGE:
        size = image_size(data)
        claimed = _UNKNOWN_PIXELS if size is None else size[0] * size[1]
        # What is not pixels, a colour profile or text, is inflated too.
        return max(claimed, len(data), 1)
    if modality == VIDEO:
        # A still scene compresses without bound.
        return max(_UNKNOWN_PIXELS, len(data) * _VIDEO_PIXELS_A_BYTE)
    return max(len(data), 1)
