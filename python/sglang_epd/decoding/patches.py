"""Images cut into a tower's patches, in a decoding child.

What is made are the bytes that `transformers`' processor of Qwen2-VL has before it rescales
and normalises; `encoder.model.patches` does the rest, and proves that both agree. Leans on
torch alone, whose `interpolate` the processor calls in the end: to import the processor takes
three times as long, and half as much memory again.
"""

from __future__ import annotations

import mmap

import torch
from torch.nn.functional import interpolate

from sglang_epd.decoding.messages import Cut


def cut_out(memory: mmap.mmap | bytes, size: tuple[int, int], cut: Cut) -> None:
    """Write a picture's patches, uint8 [patches, 3 * patch * patch], behind its pixels.

    Args:
        memory: its pixels [height, width, 4], then room.
        size: its width and height.
    """
    width, height = size
    count = 4 * width * height
    pixels = torch.frombuffer(memory, dtype=torch.uint8, count=count)
    # The fourth byte is resized along: to leave it out first would be a copy.
    picture = pixels.view(1, height, width, 4).permute(0, 3, 1, 2)
    across, down = cut.resized(width, height)
    if (across, down) != (width, height):
        picture = interpolate(picture, (down, across), mode="bicubic", antialias=True)
    patch, merge = cut.patch, cut.merge
    blocks = (down // patch // merge, merge, patch), (across // patch // merge, merge, patch)
    parts = picture[0, :3].unflatten(2, blocks[1]).unflatten(1, blocks[0])
    there = torch.frombuffer(memory, dtype=torch.uint8, count=3 * down * across, offset=count)
    # Blocks that become one embedding follow each other, and in each of them its patches.
    ordered = parts.permute(1, 4, 2, 5, 0, 3, 6)
    there.view(ordered.shape).copy_(ordered)
