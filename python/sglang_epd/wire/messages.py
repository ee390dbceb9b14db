"""The payload channel's messages (encoder and language server) and the control
channel's (tokenizer and scheduler process of one language server).

    encoder                    scheduler process              tokenizer process
       |                              | <------- Hello ------------- |
       |                              | -------- Welcome ----------> |
       |                              | <------- Expect ------------ |  before dispatch
       | -------- Offer ------------> |                              |
       | <------- Grant | Decline --- |                              |
       | -------- Payload + frames -> |                              |
       | <------- Ack --------------- |                              |
       |                              | <------- Fail | Cancel ----- |

A ticket is an unguessable capability: whoever names it may deliver that request's
items, and nobody else can.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.envelope import open_envelope, seal

# A layout is some hundred bytes, a long video's timestamps some thousand.
MAX_HEADER_BYTES = 256 << 10
MAX_ITEMS = 4096
KEY_BYTES = 32

MODALITIES = ("IMAGE", "VIDEO", "AUDIO")

# What msgspec raises for bytes of somebody else's making: its own errors, and for
# text that is not UTF-8 or nested too deeply the interpreter's.
MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)

# Reasons of a Decline. Each tells the encoder whether the work was wasted.
DECLINE_UNKNOWN = "unknown"  # no such ticket or item, or none that is remembered
DECLINE_CANCELLED = "cancelled"  # nobody waits for it any more
DECLINE_DUPLICATE = "duplicate"  # that item is here already
DECLINE_TOO_LARGE = "too_large"  # larger than this receiver may ever hold


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor frame's dtype (torch name without the prefix) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Layout(msgspec.Struct, frozen=True):
    """Everything a prompt needs to know of an item except its embedding.

    Attributes:
        modality: "IMAGE", "VIDEO" or "AUDIO".
        embedding: dtype and shape [tokens, width] of the embedding.
        grid: the processor's grid of the item, one row an entry
            ([t, h, w] in patches for images and videos, [length] for audio).
        extra: per-item metadata that the model's processor asks for
            (`video_timestamps`, `second_per_grid_ts`), JSON-like.
    """

    modality: str
    embedding: TensorSpec
    grid: list[list[int]]
    extra: dict[str, Any] = {}

    @property
    def tokens(self) -> int:
        return self.embedding.shape[0]


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages."""


class Offer(Message, frozen=True, tag="offer"):
    """Encoder: item `item` of `ticket` has this layout and key; may I send it?"""

    ticket: str
    item: int
    key: bytes
    layout: Layout
    nbytes: int


class Grant(Message, frozen=True, tag="grant"):
    """Receiver: memory is reserved under `grant`; send the payload."""

    ticket: str
    item: int
    grant: int


class Decline(Message, frozen=True, tag="decline"):
    """Receiver: do not send; `reason` is one of the DECLINE_ constants."""

    ticket: str
    item: int
    reason: str


class Payload(Message, frozen=True, tag="payload"):
    """Encoder: the embedding, in the one tensor frame that follows."""

    ticket: str
    item: int
    grant: int


class Ack(Message, frozen=True, tag="ack"):
    """Receiver: the payload was taken (`error` empty) or dropped."""

    ticket: str
    item: int
    grant: int
    error: str = ""


class Hello(Message, frozen=True, tag="hello"):
    """Tokenizer: where do encoders reach you?"""


class Welcome(Message, frozen=True, tag="welcome"):
    """Scheduler: the payload channel's endpoint, as encoders are to dial it."""

    endpoint: str


class Expect(Message, frozen=True, tag="expect"):
    """Tokenizer: a request with `items` items is on its way.

    Attributes:
        consumers: how many scheduler requests will claim it (n > 1 sampling sends
            the prompt once to warm the prefix and once a sample).
        ttl_s: seconds from now until the request's deadline.
    """

    ticket: str
    items: int
    consumers: int
    ttl_s: float


class Fail(Message, frozen=True, tag="fail"):
    """Tokenizer: no encoder could deliver; the request ends with this error."""

    ticket: str
    code: str
    message: str


class Cancel(Message, frozen=True, tag="cancel"):
    """Tokenizer: the client went away."""

    ticket: str


_AnyMessage = Offer | Grant | Decline | Payload | Ack | Hello | Welcome | Expect | Fail | Cancel
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_AnyMessage)


def encode_message(message: Message) -> bytes:
    """Encode to one frame, envelope included."""
    return seal(_ENCODER.encode(message))


def decode_message(frame: bytes | memoryview) -> Message:
    """Decode one frame.

    Raises:
        ProtocolError: for anything that is not a well-formed message of this
            major version within its bounds.
    """
    body = open_envelope(frame, MAX_HEADER_BYTES)
    try:
        message: Message = _DECODER.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"malformed message: {error}") from None
    if isinstance(message, Offer):
        _check_offer(message)
    elif isinstance(message, Expect) and not (
        0 < message.items <= MAX_ITEMS
        and message.consumers > 0
        and 0 < message.ttl_s < float("inf")
    ):
        raise ProtocolError("expect: items, consumers or ttl out of range")
    return message


def _check_offer(offer: Offer) -> None:
    shape = offer.layout.embedding.shape
    if not 0 <= offer.item < MAX_ITEMS:
        raise ProtocolError(f"offer: item {offer.item} out of range")
    if len(offer.key) != KEY_BYTES:
        raise ProtocolError(f"offer: key of {len(offer.key)} bytes")
    if len(shape) != 2 or min(shape) <= 0:
        raise ProtocolError(f"offer: embedding shape {shape}")
