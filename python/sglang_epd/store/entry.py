"""An entry of a store: one self-contained safetensors file with an embedding.

    8 bytes   length of the header, little endian
    header    {"__metadata__": {...}, "embedding": {"dtype", "shape", "data_offsets"}}
    payload   the embedding's bytes

The metadata are texts: the version of this form, the key, the layout, the time of writing,
and a blake3 digest over those three and the payload. With a token the digest is keyed by
it: an entry that was written without the token is not used.

A store is not trusted: the form is read strictly, and every size is compared with the
bytes that came.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from blake3 import blake3

from sglang_epd.errors import ProtocolError
from sglang_epd.modality import MODALITIES
from sglang_epd.store.backend import StoreError
from sglang_epd.wire.messages import KEY_BYTES, MALFORMED, MAX_HEADER_BYTES, Layout
from sglang_epd.wire.tensors import spec_bytes, tensor_frame, tensor_spec, view_tensor

if TYPE_CHECKING:
    import torch

VERSION = "1"
_ALIGNMENT = 64
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Bytes that `seal` adds to a payload.
MAX_OVERHEAD_BYTES = 8 + MAX_HEADER_BYTES + _ALIGNMENT


class CorruptEntryError(StoreError):
    """These bytes are no entry, or not the one that was asked for."""

    outcome = "corrupt"


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    key: str
    layout: str
    written_at: str
    blake3: str


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1)]]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    embedding: _Tensor


_header_decoder = msgspec.json.Decoder(_Header)
_layout_decoder = msgspec.json.Decoder(Layout)


@dataclass(frozen=True)
class StoredEntry:
    """An embedding [tokens, width] on the host, as it was read back.

    Attributes:
        written_at: seconds since 1970, on the clock of the encoder that wrote it.
    """

    layout: Layout
    embedding: torch.Tensor = field(repr=False)
    written_at: float


class Sealer:
    """Makes and opens entries.

    Args:
        token: the secret that digests are keyed by; none if empty.
    """

    def __init__(self, token: str = "") -> None:
        self._mac = (
            blake3(token.encode(), derive_key_context="sglang-epd store entries").digest()
            if token
            else None
        )
        # Encoders of two tokens cannot read each other's entries, and must not remove them as
        # corrupt: the names differ.
        identity = blake3(self._mac).hexdigest()[:8] if self._mac else "open"
        self.folder = f"v{VERSION}-{identity}"

    def seal(
        self, key: bytes, layout: Layout, embedding: torch.Tensor, written_at: float
    ) -> list[memoryview]:
        """An entry, in pieces; the last is the embedding's memory, not a copy.

        Args:
            embedding: [tokens, width], on the host.
            written_at: seconds since 1970.

        Raises:
            ProtocolError: the embedding does not fit its layout, or cannot be stored.
        """
        if tensor_spec(embedding) != layout.embedding:
            raise ProtocolError("the embedding is not what its layout says")
        payload = tensor_frame(embedding)
        described = msgspec.json.encode(layout).decode()
        stamp = f"{written_at:.3f}"
        digest = self._digest(key.hex(), described, stamp, payload)
        metadata = _Metadata(VERSION, key.hex(), described, stamp, digest)
        spec = layout.embedding
        tokens, width = spec.shape
        tensor = _Tensor(_DTYPES[spec.dtype], (tokens, width), (0, payload.nbytes))
        header = msgspec.json.encode(_Header(metadata, tensor))
        header += b" " * (-(8 + len(header)) % _ALIGNMENT)
        if len(header) > MAX_HEADER_BYTES:
            raise ProtocolError("the layout is too long to be stored")
        return [memoryview(struct.pack("<Q", len(header)) + header), payload]

    def open(self, key: bytes, modality: str, raw: np.ndarray) -> StoredEntry:
        """Read an entry; the embedding is a view of `raw`.

        Args:
            key, modality: of the entry that was asked for.
            raw: uint8, one dimension, in memory of its own.

        Raises:
            CorruptEntryError: the bytes are no entry of that key.
        """
        header, payload = _split(raw)
        metadata, tensor = header.metadata, header.embedding
        try:
            layout = _layout_decoder.decode(metadata.layout)
            nbytes = spec_bytes(layout.embedding)
            written_at = float(metadata.written_at)
        except (*MALFORMED, ProtocolError) as error:
            raise CorruptEntryError("the layout cannot be read") from error
        spec = layout.embedding
        agree = (
            metadata.version == VERSION
            and metadata.key == key.hex()
            and len(key) == KEY_BYTES
            and layout.modality == modality
            and modality in MODALITIES
            and tensor.dtype == _DTYPES[spec.dtype]
            and tensor.shape == spec.shape
            and tensor.data_offsets == (0, nbytes)
            and payload.nbytes == nbytes
            and all(number > 0 for row in layout.grid for number in row)
            and math.isfinite(written_at)
        )
        if not agree:
            raise CorruptEntryError("the header contradicts itself, its payload or its name")
        digest = self._digest(metadata.key, metadata.layout, metadata.written_at, payload.data)
        if digest != metadata.blake3:
            raise CorruptEntryError("the digest is another")
        return StoredEntry(layout, view_tensor(payload, spec), written_at)

    def _digest(self, key: str, layout: str, stamp: str, payload: memoryview) -> str:
        hasher = blake3(key=self._mac) if self._mac else blake3()
        hasher.update(f"{VERSION}\n{key}\n{stamp}\n{layout}\n".encode())
        hasher.update(payload)
        return hasher.hexdigest()


def _split(raw: np.ndarray) -> tuple[_Header, np.ndarray]:
    if raw.nbytes < 8:
        raise CorruptEntryError("too short")
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    if length > min(MAX_HEADER_BYTES, raw.nbytes - 8) or (8 + length) % _ALIGNMENT:
        raise CorruptEntryError("the header's length cannot be right")
    try:
        header = _header_decoder.decode(raw[8 : 8 + length].tobytes())
    except MALFORMED as error:
        raise CorruptEntryError("the header cannot be read") from error
    return header, raw[8 + length :]
