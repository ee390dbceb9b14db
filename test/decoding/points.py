"""A kind of media that the package does not have: points in space. Importing it adds its row."""

from __future__ import annotations

import numpy as np

from sglang_epd.errors import MediaError
from sglang_epd.media import MediaLimits
from sglang_epd.modality import MODALITIES, Modality

CPU_S = 1


def needed_bytes(_rate_hz: int, limits: MediaLimits) -> int:
    return limits.max_bytes


def decode(data: bytes, _rate_hz: int, _limits: MediaLimits) -> np.ndarray:
    """float32 [points, 3]."""
    if len(data) % 12:
        raise MediaError("a point has no three numbers")
    return np.frombuffer(data, np.float32).reshape(-1, 3)


MODALITIES["POINTS"] = Modality("POINTS", "", "", 1.0, decoder="decoding.points")
