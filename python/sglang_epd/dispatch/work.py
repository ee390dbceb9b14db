"""An item as a policy sees it: its key and the expected cost of its encoding, in patches.

Both are estimates, made before anything is fetched or decoded. The encoder has the true
key and the true cost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from blake3 import blake3

from sglang_epd.dispatch.policies import ItemCost
from sglang_epd.media import image_size
from sglang_epd.modality import IMAGE, MODALITIES
from sglang_epd.wire.http import EncodeItem, ItemLayout

# Of most vision towers; running means make up for others.
_PIXELS_PER_PATCH = 14 * 14
# Patches that Qwen's processors make of the largest picture by default.
_MAX_IMAGE_PATCHES = 65_536.0
# The most that a grid may claim to have cost.
_MAX_PATCHES = 1 << 22
# The weight of one item in the running means.
_EMA = 0.1
# A picture that came to less of its estimate than this was made smaller; larger patches
# and sides that are rounded to whole ones explain no more, unless the picture is small.
_SHRUNK = 0.6
_SMALL_PATCHES = 1024


class Costs:
    """The costs of items, learnt from those that were encoded. For one thread.

    Patches for images and videos, feature frames for sounds, as encoders count them.
    """

    def __init__(self) -> None:
        self._means = {name: row.start_patches for name, row in MODALITIES.items()}
        # What the processor makes of large pictures: it shrinks them.
        self._largest_image = _MAX_IMAGE_PATCHES

    def estimate(self, item: EncodeItem) -> float:
        """Patches that an item will come to; at least one."""
        claimed = _claimed_patches(item)
        if claimed is None:
            return self._means[item.modality]
        return max(1.0, min(claimed, self._largest_image))

    def learn(self, item: EncodeItem, told: ItemLayout) -> None:
        """Learn the true cost of an item that was encoded.

        Args:
            told: its layout, from the encoder.
        """
        patches = float(sum(math.prod(row) for row in told.layout.grid))
        patches = min(max(patches, 1.0), _MAX_PATCHES)
        mean = self._means[item.modality]
        self._means[item.modality] = mean + _EMA * (patches - mean)
        claimed = _claimed_patches(item) or 0.0
        shrunk = claimed > _SMALL_PATCHES and patches < _SHRUNK * claimed
        if shrunk or (claimed and patches > self._largest_image):
            self._largest_image = min(patches, _MAX_IMAGE_PATCHES)


def describe(items: Sequence[EncodeItem], costs: Costs) -> list[ItemCost]:
    """Items as policies see them, in their order.

    Hashes inline bytes that have no digest yet (some 3 GB a second). Raises nothing, for any
    input.
    """
    return [ItemCost(_key(item), costs.estimate(item)) for item in items]


def _key(item: EncodeItem) -> bytes:
    try:
        options = json.dumps([item.modality, item.options], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        # Not plain data: the encoder will say so.
        options = item.modality
    hasher = blake3(options.encode())
    if item.data is not None:
        hasher.update(b"\0data\0")
        hasher.update(item.digest)
    else:
        hasher.update(b"\0url\0")
        hasher.update((item.url or "").encode(errors="surrogatepass"))
    return hasher.digest()


def _claimed_patches(item: EncodeItem) -> float | None:
    """By an inline picture's header; None for all else."""
    if item.data is None or item.modality != IMAGE:
        return None
    size = image_size(item.data)
    return None if size is None else size[0] * size[1] / _PIXELS_PER_PATCH
