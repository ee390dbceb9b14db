"""The messages between a server and a decoding child.

server                         child
  | ---- Look (file) -------->   |  the item, and its first allowance
  | <--- Needs ----------------- |  a picture that takes more; its item is over
  | <--- Picture (new file) ---- |
  | <--- Array (file) ---------- |  of a sound, say
  | <--- VideoFacts ------------ |  a video; it stays open
  | ---- ReadFrames ---------->  |  frames of it, as often as wanted
  | <--- Array (file) ---------- |
  | ---- Drop ---------------->  |  the item is over; no answer
  | <--- NotDecoded ------------ |  in place of any answer
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from sglang_epd.errors import MediaError
from sglang_epd.media import VideoFacts

_LONGEST = 200


class Cut(msgspec.Struct, frozen=True):
    """How a picture is resized and cut into patches, as `transformers` does for Qwen2-VL.

    Attributes:
        patch: a patch's side, in pixels.
        merge: patches side by side, and one above the other, that become one embedding.
        least, most: pixels of the picture once it is resized.
    """

    patch: int
    merge: int
    least: int
    most: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of a picture of this size once it is resized.

        Args:
            width, height: in pixels.

        Raises:
            MediaError: it is too long for its breadth.
        """
        ratio = max(width, height) / min(width, height)
        if ratio > _LONGEST:
            raise MediaError(
                f"cannot be preprocessed: absolute aspect ratio must be smaller than {_LONGEST}, "
                f"got {ratio}"
            )
        unit = self.patch * self.merge
        across, down = round(width / unit), round(height / unit)
        if across * down * unit**2 > self.most:
            shrink = math.sqrt(width * height / self.most)
            across = max(1, math.floor(width / shrink / unit))
            down = max(1, math.floor(height / shrink / unit))
        elif across * down * unit**2 < self.least:
            grow = math.sqrt(self.least / (width * height))
            across, down = math.ceil(width * grow / unit), math.ceil(height * grow / unit)
        return across * unit, down * unit


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The item in the file that comes with this.

    Attributes:
        allowed_bytes: how far the child may grow for it.
        rate_hz: of samples, for sounds.
        cut: for a picture of which patches are wanted.
        smart_rgb: for a picture (`media.decode.read_image`).
    """

    modality: str
    allowed_bytes: int
    rate_hz: int = 0
    cut: Cut | None = None
    smart_rgb: bool = False


class ReadFrames(msgspec.Struct, frozen=True, tag="read"):
    """These frames, by so many threads, within as many bytes and processor seconds."""

    indices: list[int]
    threads: int
    allowed_bytes: int
    cpu_s: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """The item is over."""


class Needs(msgspec.Struct, frozen=True, tag="needs"):
    """The memory that a picture takes.

    Attributes:
        child_bytes: to decode it.
        total_bytes: most that it takes at a time, here or where it is prepared.
    """

    child_bytes: int
    total_bytes: int


class Picture(msgspec.Struct, frozen=True, tag="picture"):
    """Pixels [height, width, 4] in the file that comes with this, or came last (`canvas`);
    behind them the patches that were wanted (`patches`)."""

    width: int
    height: int


class Array(msgspec.Struct, frozen=True, tag="array"):
    """Numbers in the file that comes with this: samples, or frames [count, height, width, 3]."""

    dtype: Literal["uint8", "float32"]
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class NotDecoded(msgspec.Struct, frozen=True, tag="failed"):
    """The item failed.

    Attributes:
        code, message: of the error, as `errors.from_code` takes them.
        detail: for the log: the library's error, which may quote the file.
    """

    code: str
    message: str
    detail: str = ""


ToChild = Look | ReadFrames | Drop
ToServer = Needs | Picture | Array | VideoFacts | NotDecoded
TO_CHILD: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
TO_SERVER: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
