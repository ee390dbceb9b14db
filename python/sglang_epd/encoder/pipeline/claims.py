"""How much there is to prepare in an item, by what its first bytes claim.

In pixels, because decoding costs by pixels: a picture of 100 megapixels may be a kilobyte
long. It is an estimate for who goes first, not a limit: decoding has its own.
"""

from __future__ import annotations

from sglang_epd.media import image_size
from sglang_epd.modality import IMAGE, VIDEO

# Takes a fraction of a second to decode, in whatever format.
SMALL_PIXELS = 4 << 20
# A picture whose header is not read here may be anything.
_UNKNOWN_PIXELS = 4 * SMALL_PIXELS
_VIDEO_PIXELS_A_BYTE = 64


def claimed_pixels(modality: str, data: bytes) -> int:
    """What decoding an item costs, as far as can be told in microseconds; at least 1.

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
