"""Where a decoding child puts an image's pixels: one file, for one image after the other.

The server has the file mapped as well, and copies an image out before it sends the next:
new pages for each image took a third of the time. Leans on Pillow's `core.map_buffer`,
and on its four bytes a pixel.
"""

from __future__ import annotations

import mmap
from typing import Any

from PIL import Image

from sglang_epd.processes.packets import close_all, new_file


class Canvas:
    """A file as large as the largest picture so far.

    Attributes:
        pixels: the file.
    """

    def __init__(self) -> None:
        self.pixels: mmap.mmap | bytes = b""
        self._untold: list[int] = []
        self._core: Any = None

    def blank(self, size: tuple[int, int], behind: int = 0) -> Image.Image:
        """A black RGB picture, in the place of the last one, with so many bytes behind it.

        Args:
            size: width and height.
            behind: bytes of room behind its pixels.
        """
        nbytes = 4 * size[0] * size[1] + behind
        if nbytes > len(self.pixels) or self._untold:
            self._core, self.pixels = None, b""  # its memory is free first
            close_all(self._untold)
            self._untold = [new_file(nbytes)]
            self.pixels = mmap.mmap(self._untold[0], nbytes)
        blank = picture(self.pixels, size)
        self._core = blank.im
        # A decoder that leaves pixels out must not show those of another user's picture.
        blank.paste(0, (0, 0, *size))
        return blank

    def hold(self, made: Image.Image, behind: int = 0) -> None:
        """Have this RGB picture here, with so many bytes behind it."""
        if made.im is not self._core:
            self.blank(made.size, behind).paste(made)

    def tell(self) -> list[int]:
        """The descriptor of the file, if the server does not have it yet; to be sent without fail:
        the next picture may be drawn in that file, and be looked for there."""
        told, self._untold = self._untold, []
        return told


def picture(pixels: mmap.mmap | bytes, size: tuple[int, int]) -> Image.Image:
    """The RGB picture that is in this memory."""
    return Image.Image()._new(Image.core.map_buffer(pixels, size, "raw", 0, ("RGB", 0, 1)))
