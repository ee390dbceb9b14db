"""The bodies of the encode API (`POST /v1/encode`) and of a prefill server's layouts
(`GET /epd/layouts/{room}`), as msgpack behind the envelope.

Media travel as binary, not as base64 inside JSON. `open_session` and `read_body` are for all
HTTP among this package's servers.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import aiohttp
import msgspec
from blake3 import blake3

from sglang_epd.errors import ProtocolError
from sglang_epd.modality import MODALITIES
from sglang_epd.wire.envelope import open_envelope, seal
from sglang_epd.wire.messages import KEY_BYTES, MALFORMED, MAX_ITEMS, Layout, check_layout

# MiB of inline media in an encode request, but for one item: an encoder takes them at least.
MOST_MB = 64
CONTENT_TYPE = "application/vnd.sglang-epd+msgpack"
_MAX_ID_CHARS = 256
# msgpack's headers of binary data, with a length in one byte and in four.
_BIN_8, _BIN_32 = struct.Struct(">BB"), struct.Struct(">BI")
# Stands for media in a body, until they are put in its place.
_MARK_BYTES = 16
_COPIED_BYTES = 64 << 10


class EncodeItem(msgspec.Struct, frozen=True, dict=True):
    """One image, video or audio part.

    Attributes:
        item: its place in the request, over all modalities.
        label: its name for people ("image 2 of 3"), for error messages.
        data: the encoded media (JPEG, PNG, ...), or None when `url` says where it is.
        options: per-item preprocessing options of the request (`detail`, ...).
        content_hash: SHA-256 of the URL's content, by the caller (`sha256:` and 64 hexadecimal
            digits); empty without one. Encoders before minor version 2 do not compare it.
    """

    item: int
    modality: str
    label: str
    data: bytes | None = None
    url: str | None = None
    options: dict[str, Any] = {}
    content_hash: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.item < MAX_ITEMS:
            raise ValueError(f"item {self.item} out of range")
        if self.modality not in MODALITIES:
            raise ValueError("no such modality")
        if (self.data is None) == (self.url is None):
            raise ValueError(f"item {self.item} is either data or a URL")

    @cached_property
    def digest(self) -> bytes:
        """The blake3 digest of inline data, empty of a URL; hashed when it is first asked for."""
        return b"" if self.data is None else blake3(self.data).digest()


class ReplyTo(msgspec.Struct, frozen=True):
    """The address and ticket under which the items are delivered."""

    endpoint: str
    ticket: str


class EncodeRequest(msgspec.Struct, frozen=True):
    """Encode these items and deliver them.

    Attributes:
        request_id: unique among the live requests of the encoder.
        namespace: the asker's encoder identity; must equal the encoder's own.
        ttl_s: seconds from receipt to the request's deadline.
        asker: the request's name in the asker's logs; empty for none.
    """

    request_id: str
    namespace: str
    ttl_s: float
    reply_to: ReplyTo
    items: list[EncodeItem]
    asker: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= _MAX_ID_CHARS:
            raise ValueError(f"a request id has 1 to {_MAX_ID_CHARS} characters")
        if not 0 < self.ttl_s < float("inf"):
            raise ValueError(f"ttl of {self.ttl_s} s")
        if not 0 < len({item.item for item in self.items}) == len(self.items):
            raise ValueError("a request has items, each with a number of its own")


class ItemOutcome(msgspec.Struct, frozen=True):
    """The outcome of one item.

    Attributes:
        state: "delivered", "declined" or "failed".
        code: error class of `sglang_epd.errors` when failed; decline reason when declined.
        tokens: embedding rows delivered.
        ms: milliseconds spent in each stage.
        layout, key: the item's true ones, where they are known; None and
            empty where it is not, as from encoders before minor version 1.
        source: how the embedding came about: "computed", "cached", "stored" or "coalesced" with
            another request's; empty where none did.
    """

    item: int
    state: str
    code: str = ""
    message: str = ""
    tokens: int = 0
    ms: dict[str, float] = {}
    layout: Layout | None = None
    key: bytes = b""
    source: str = ""


class EncodeReply(msgspec.Struct, frozen=True):
    """Answer to an EncodeRequest that was accepted; one outcome an item."""

    request_id: str
    encoder: str
    outcomes: list[ItemOutcome]


class ErrorReply(msgspec.Struct, frozen=True):
    """Answer to an EncodeRequest that was refused as a whole."""

    code: str
    message: str


class ItemLayout(msgspec.Struct, frozen=True):
    """All of an item that a prompt is laid out by: its key and its layout."""

    key: bytes
    layout: Layout

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"key of {len(self.key)} bytes")
        check_layout(self.layout)


class LayoutReply(msgspec.Struct, frozen=True):
    """A prefill server's answer about one request's media: all items, or its failure."""

    items: list[ItemLayout] = []
    error: ErrorReply | None = None


_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode_body(body: msgspec.Struct) -> bytes:
    """Encode a request or reply, envelope included."""
    return seal(_ENCODER.encode(body))


def body_pieces(request: EncodeRequest) -> list[bytes]:
    """The body of a request, in pieces: large media are not copied, because
    nothing else would run meanwhile."""
    marks = {
        item.item: secrets.token_bytes(_MARK_BYTES)
        for item in request.items
        if item.data is not None and len(item.data) > _COPIED_BYTES
    }
    items = [
        msgspec.structs.replace(item, data=marks[item.item]) if item.item in marks else item
        for item in request.items
    ]
    rest = encode_body(msgspec.structs.replace(request, items=items))
    pieces = []
    for item in request.items:
        if item.item in marks:
            assert item.data is not None
            mark = _BIN_8.pack(0xC4, _MARK_BYTES) + marks[item.item]
            before, _, rest = rest.partition(mark)
            pieces += [before + _BIN_32.pack(0xC6, len(item.data)), item.data]
    return [*pieces, rest]


def decode_body(data: bytes | bytearray, kind: type[T], max_bytes: int) -> T:
    """Decode a body as `kind`.

    Raises:
        ProtocolError: not a well-formed `kind` of this major version.
    """
    view = open_envelope(memoryview(data), max_bytes)
    try:
        return msgspec.msgpack.decode(view, type=kind)
    except MALFORMED as error:
        raise ProtocolError(f"malformed {kind.__name__}: {error}") from None


def open_session(
    headers: Mapping[str, str] | None = None, **connector: Any
) -> aiohttp.ClientSession:
    """A session without cookies, proxies and a bound on connections; the caller closes it.

    Args:
        headers: of every request.
        connector: options of `aiohttp.TCPConnector`.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connector),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        headers=headers,
    )


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, or its beginning: more than `max_bytes` where it is longer than that."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)
