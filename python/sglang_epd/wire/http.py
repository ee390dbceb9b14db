"""The encode API's bodies (`POST /v1/encode`), as msgpack behind the envelope.

Media travel as binary, not as base64 inside JSON.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.envelope import open_envelope, seal
from sglang_epd.wire.messages import MALFORMED, MAX_ITEMS, MODALITIES

CONTENT_TYPE = "application/vnd.sglang-epd+msgpack"
_MAX_ID_CHARS = 256


class EncodeItem(msgspec.Struct, frozen=True):
    """One image, video or audio part.

    Attributes:
        item: its place in the request, over all modalities.
        label: what a person calls it ("image 2 of 3"), for error messages.
        data: the encoded media (JPEG, PNG, ...), or None when `url` says where it is.
        options: per-item preprocessing options of the request (`detail`, ...).
    """

    item: int
    modality: str
    label: str
    data: bytes | None = None
    url: str | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not 0 <= self.item < MAX_ITEMS:
            raise ValueError(f"item {self.item} out of range")
        if self.modality not in MODALITIES:
            raise ValueError("no such modality")
        if (self.data is None) == (self.url is None):
            raise ValueError(f"item {self.item} is either data or a URL")


class ReplyTo(msgspec.Struct, frozen=True):
    """Where and as whom the items are delivered."""

    endpoint: str
    ticket: str


class EncodeRequest(msgspec.Struct, frozen=True):
    """Encode these items and deliver them.

    Attributes:
        request_id: unique among the live requests of the encoder.
        namespace: the asker's encoder identity; must equal the encoder's own.
        ttl_s: seconds from receipt until nobody wants the result any more.
    """

    request_id: str
    namespace: str
    ttl_s: float
    reply_to: ReplyTo
    items: list[EncodeItem]

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= _MAX_ID_CHARS:
            raise ValueError(f"a request id has 1 to {_MAX_ID_CHARS} characters")
        if not 0 < self.ttl_s < float("inf"):
            raise ValueError(f"ttl of {self.ttl_s} s")
        if not 0 < len({item.item for item in self.items}) == len(self.items):
            raise ValueError("a request has items, each with a number of its own")


class ItemOutcome(msgspec.Struct, frozen=True):
    """What became of one item.

    Attributes:
        state: "delivered", "declined" or "failed".
        code: error class of `sglang_epd.errors` when failed; decline reason when declined.
        tokens: embedding rows delivered.
        ms: milliseconds spent in each stage.
    """

    item: int
    state: str
    code: str = ""
    message: str = ""
    tokens: int = 0
    ms: dict[str, float] = {}


class EncodeReply(msgspec.Struct, frozen=True):
    """Answer to an EncodeRequest that was accepted; one outcome an item."""

    request_id: str
    encoder: str
    outcomes: list[ItemOutcome]


class ErrorReply(msgspec.Struct, frozen=True):
    """Answer to an EncodeRequest that was refused as a whole."""

    code: str
    message: str


_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode_body(body: msgspec.Struct) -> bytes:
    """Encode a request or reply, envelope included."""
    return seal(_ENCODER.encode(body))


def decode_body(data: bytes, kind: type[T], max_bytes: int) -> T:
    """Decode a body as `kind`.

    Raises:
        ProtocolError: not a well-formed `kind` of this major version.
    """
    view = open_envelope(data, max_bytes)
    try:
        return msgspec.msgpack.decode(view, type=kind)
    except MALFORMED as error:
        raise ProtocolError(f"malformed {kind.__name__}: {error}") from None
