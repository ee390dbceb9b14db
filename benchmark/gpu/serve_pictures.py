"""Pictures that need no file: coarse colours under fine grain, each unlike the others."""

from __future__ import annotations

import base64
import hashlib
import io

import numpy as np
from PIL import Image

SIZES = {"448": (448, 448), "1080p": (1920, 1080)}
_QUALITY = 90
_CELLS = 12
_GRAIN = 12


def picture(size: str | tuple[int, int], seed: object, kind: str = "JPEG") -> bytes:
    """A file, as JPEG of some hundred kilobytes at 1080p.

    Args:
        size: of `SIZES`, or a width and height in pixels.
        seed: another one, another picture.
        kind: "JPEG" or "PNG".
    """
    width, height = SIZES[size] if isinstance(size, str) else size
    digest = hashlib.sha256(repr((width, height, seed)).encode()).digest()
    draw = np.random.default_rng(list(digest))
    coarse = draw.integers(0, 256, (_CELLS, _CELLS, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    grain = draw.integers(-_GRAIN, _GRAIN + 1, (height, width, 1), dtype=np.int16)
    pixels = np.clip(np.asarray(smooth, dtype=np.int16) + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=_QUALITY)
    return file.getvalue()


def data_url(file: bytes, kind: str = "JPEG") -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file).decode()}"
