"""Patches that decoding children cut, and what is left of `transformers`' preprocessing.

The processor of Qwen2-VL and its successors resizes a picture, rescales and normalises each
value by itself, and sets the result down once for each frame of a patch. A child does the
first of these (`decoding.patches`): whole numbers cross the processes and go onto the device,
an eighth of the bytes. The device does the others, with the processor's own operations, so the
features are its own to the last bit. `proven` sees to that before the first user comes.

Leans on the attributes of `transformers.Qwen2VLImageProcessor`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from sglang_epd.decoding.canvas import Canvas
from sglang_epd.decoding.messages import Cut
from sglang_epd.decoding.patches import cut_out
from sglang_epd.device import Device
from sglang_epd.processes.packets import close_all

logger = logging.getLogger(__name__)

_FLAGS = ("do_resize", "do_rescale", "do_normalize")
_PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
# Odd, even, made larger, made smaller, and as they are.
_PROOF_SIZES = ((40, 30), (333, 517), (448, 448), (640, 33))


class Patches:
    """What a tower gets of patches.

    Args:
        processor: of the model's pictures.
        cut: that the processor makes of them.
        device: where features are made.
    """

    def __init__(self, processor: Any, cut: Cut, device: Device) -> None:
        self.cut = cut
        self._device = device
        self._shape = (3, processor.temporal_patch_size, cut.patch**2)
        scale = 1.0 / processor.rescale_factor
        self._mean, self._std = (
            device.empty((3, 1, 1), torch.float32).copy_((torch.tensor(of) * scale).view(3, 1, 1))
            for of in (processor.image_mean, processor.image_std)
        )

    def features(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each part what the processor makes of it, on the device, queued on the current
        stream.

        Args:
            parts: uint8 [patches, 3 * patch * patch].

        Returns:
            float32 [patches, 3 * frames * patch * patch].
        """
        channels, _, area = self._shape
        counts = [len(part) for part in parts]
        whole = self._device.empty((sum(counts), channels * area), torch.uint8)
        for there, part in zip(whole.split(counts), parts, strict=True):
            there.copy_(part, non_blocking=True)
        made = self._device.empty((sum(counts), *self._shape), torch.float32)
        first = made[:, :, :1]
        first.copy_(whole.view(-1, channels, 1, area)).sub_(self._mean).div_(self._std)
        made[:, :, 1:].copy_(first)
        return list(made.view(len(made), -1).split(counts))

    def finish(self, items: list[Any]) -> list[Any]:
        """SGLang's items with the features that the tower reads, which are not kept for a
        second run; those that have them come back as they are."""
        if any(item.feature.dtype != torch.uint8 for item in items):
            return items
        finished = [copy.copy(item) for item in items]
        made = self.features([item.feature for item in items])
        for item, feature in zip(finished, made, strict=True):
            item.feature = feature
        return finished


def proven(processor: Any, options: dict[str, Any], device: Device) -> Patches | None:
    """How patches of a model are made apart; None where they would not be the processor's.

    Args:
        processor: of the model's pictures.
        options: that it is called with.
        device: of the tower.
    """
    from transformers import Qwen2VLImageProcessor
    from transformers.image_utils import PILImageResampling

    if type(processor) is not Qwen2VLImageProcessor or not options.keys() <= _PIXELS.keys():
        return None
    bicubic = processor.resample == PILImageResampling.BICUBIC
    if not bicubic or not all(getattr(processor, name) for name in _FLAGS):
        return None
    least, most = (options.get(n) or getattr(processor.size, of) for n, of in _PIXELS.items())
    cut = Cut(processor.patch_size, processor.merge_size, least, most)
    patches = Patches(processor, cut, device)
    for size in _PROOF_SIZES:
        noise = Image.merge("RGB", [Image.effect_noise(size, 90) for _ in "RGB"])
        expected = processor(images=[noise], return_tensors="pt", **options)["pixel_values"]
        if not torch.equal(patches.features([_cut(noise, cut)])[0].cpu(), expected):
            logger.warning("Pictures are preprocessed in the server: patches would differ")
            return None
    return patches


def _cut(picture: Image.Image, cut: Cut) -> torch.Tensor:
    """A picture's patches as a child makes them."""
    canvas = Canvas()
    across, down = cut.resized(*picture.size)
    canvas.hold(picture, 3 * across * down)
    close_all(canvas.tell())
    cut_out(canvas.pixels, picture.size, cut)
    offset = 4 * picture.width * picture.height
    made = torch.frombuffer(
        canvas.pixels, dtype=torch.uint8, count=3 * across * down, offset=offset
    )
    return made.view(-1, 3 * cut.patch**2)
