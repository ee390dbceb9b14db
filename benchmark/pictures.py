"""JPEGs of real photographs, each different from the others, and media that are bad."""

from __future__ import annotations

import functools
import io
import random
import struct
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from photographs import NAMES, load  # noqa: E402

SIZES = {"224": (224, 224), "448": (448, 448), "1080p": (1920, 1080)}
_QUALITY = 90
_photograph = functools.cache(load)


def jpeg(size: str | tuple[int, int], seed: object) -> bytes:
    """A crop of a photograph, at one of SIZES or of a width and height in pixels; another
    crop, and tint, for another seed."""
    draw = random.Random(repr((size, seed)))
    photograph = _photograph(draw.choice(NAMES))
    width, height = SIZES[size] if isinstance(size, str) else size
    scale = min(photograph.width / width, photograph.height / height) * draw.uniform(0.6, 1.0)
    box_width, box_height = scale * width, scale * height
    left = draw.uniform(0, photograph.width - box_width)
    top = draw.uniform(0, photograph.height - box_height)
    box = (left, top, left + box_width, top + box_height)
    picture = photograph.resize((width, height), box=box)
    shift = draw.randrange(-20, 20)
    picture = picture.point([min(255, max(0, level + shift)) for level in range(256)] * 3)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def truncated() -> bytes:
    """A JPEG whose second half is missing."""
    whole = jpeg("448", "truncated")
    return whole[: len(whole) // 2]


def bomb(width: int = 20_000, height: int = 10_000) -> bytes:
    """A PNG of some kilobytes that is 200 megapixels."""
    deflate = zlib.compressobj(9)
    row = bytes(1 + width // 8)
    body = b"".join(deflate.compress(row) for _ in range(height)) + deflate.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in chunks)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
