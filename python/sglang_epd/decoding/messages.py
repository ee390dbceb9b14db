"""The messages between a server and a decoding child.

server                         child
  | ---- Look (file) -------->   |  the item, and its first allowance
  | <--- Needs ----------------- |  a picture that takes more; its item is over
  | <--- Picture (new file) ---- |
  | <--- Sound (file) ---------- |
  | <--- Opened ---------------- |  a video; it stays open
  | ---- ReadFrames ---------->  |  frames of it, as often as wanted
  | <--- Frames (file) --------- |
  | ---- Drop ---------------->  |  the item is over; no answer
  | <--- NotDecoded ------------ |  in place of any answer
"""

from __future__ import annotations

import msgspec


class Look(msgspec.Struct, frozen=True, tag="look"):
    """The item in the file that comes with this.

    Attributes:
        allowed_bytes: how far the child may grow for it.
        rate_hz: of samples, for sounds.
    """

    modality: str
    allowed_bytes: int
    rate_hz: int = 0


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
    """Pixels [height, width, 4] in the file that comes with this, or came last (`canvas`)."""

    width: int
    height: int


class Sound(msgspec.Struct, frozen=True, tag="sound"):
    """Samples, float32, in the file that comes with this."""

    samples: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A video's header (`media.VideoFacts`)."""

    frames: int
    width: int
    height: int
    frames_per_second: float


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """Pixels [count, height, width, 3] in the file that comes with this."""

    count: int


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
ToServer = Needs | Picture | Sound | Opened | Frames | NotDecoded
TO_CHILD: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
TO_SERVER: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
