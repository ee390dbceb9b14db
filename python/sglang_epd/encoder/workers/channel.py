"""The messages between the encoder's front and its workers, and the way of bytes.

    front                          worker
      | ---- Start --------------->  |  once, first
      | <--- Ready, or Failed ------ |
      | ---- Prepare (media) ----->  |
      | <--- Laid, or Failed ------- |
      | ---- Forward ------------->  |
      | <--- Embedding (tensor) ---- |  one an item
      | <--- Done, or Failed ------- |
      | ---- Discard ------------->  |
      | ---- ProfileTower -------->  |
      | <--- Done, or Failed ------- |
      | ---- Ping ---------------->  |
      | <--- Pong ------------------ |

The worker inherits its end of the channel. Media and embeddings cross as files in memory
(`processes.packets`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_epd.encoder.tower import ProfileRequest
from sglang_epd.errors import ProtocolError
from sglang_epd.processes.packets import write_file
from sglang_epd.wire.messages import Layout, TensorSpec
from sglang_epd.wire.tensors import spec_bytes, tensor_frame, view_tensor

if TYPE_CHECKING:
    import torch

# Longer embeddings are mapped where they are, shorter ones copied: a process may have
# 65530 mappings, and an embedding may be kept for long.
_MAPPED_BYTES = 1 << 20


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Front: build your engine by `factory`, which is `module:function`, from `options`."""

    factory: str
    options: dict[str, Any]
    rank: int


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Front: prepare the media in the file that comes with this as item `item`, by a deadline."""

    call: int
    item: int
    modality: str
    deadline: float
    options: dict[str, Any] = {}


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Front: run these items together; they are forgotten if that succeeds."""

    call: int
    items: list[int]


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """Front: forget an item, prepared or still being so."""

    item: int


class ProfileTower(msgspec.Struct, frozen=True, tag="profile"):
    """Front: begin to profile, or end it."""

    call: int
    asked: ProfileRequest | None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Front: are you there?"""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker: the engine is built and warm; the attributes are those of `encoder.tower.Tower`."""

    preparers: int
    depth: int
    dtype: str
    modalities: list[str]
    weights_bytes: int


class Laid(msgspec.Struct, frozen=True, tag="laid"):
    """Worker: an item is prepared; as `tower.Prepared`, the group in words."""

    call: int
    layout: Layout
    patches: int
    group: str


class Embedding(msgspec.Struct, frozen=True, tag="embedding"):
    """Worker: the embedding of a batch's item `index` is in the file that comes with this."""

    call: int
    index: int
    spec: TensorSpec


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Worker: a batch is through, or what was asked of the profiler is done."""

    call: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Worker: a call failed; call 0 is the start, or all that the tower may be asked for.

    Attributes:
        code, message: as `errors.from_code` takes them.
        foreseen: the engine raised it on purpose, at a point that all ranks reach alike.
    """

    call: int
    code: str
    message: str
    foreseen: bool = False


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Worker: I am."""


ToWorker = Start | Prepare | Forward | Discard | ProfileTower | Ping
ToFront = Ready | Laid | Embedding | Done | Failed | Pong
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
TO_FRONT: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def write_tensor(tensor: torch.Tensor) -> int:
    """A tensor of the host as such a file."""
    return write_file(tensor_frame(tensor))


def read_tensor(fd: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor in such a file, which is closed; it shares no memory with another.

    Args:
        fd: of the file.
        spec: dtype and shape that it must have.

    Raises:
        ProtocolError: the file is not as long as `spec` says.
    """
    import torch

    try:
        nbytes = os.fstat(fd).st_size
        if nbytes != spec_bytes(spec):
            raise ProtocolError(f"a file of {nbytes} bytes for {spec}")
        raw = _mapped(fd, nbytes) if nbytes >= _MAPPED_BYTES else None
        if raw is None:
            raw = torch.empty(nbytes, dtype=torch.uint8)
            if nbytes and os.preadv(fd, [raw.numpy().data], 0) != nbytes:
                raise ProtocolError(f"a file of {nbytes} bytes was not read in one piece")
        return view_tensor(raw.numpy(), spec)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> torch.Tensor | None:
    """A file's bytes where they are; None where this process has no mapping left."""
    import torch

    try:
        # Not by `mmap`, which keeps a descriptor for as long as the mapping lives.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError:
        return None
