"""The payload channel's messages (encoder and language server) and the control
channel's (the processes of one language server).

    encoder                     receiver                  tokenizer, schedulers
       |                           | <------- Hello ------------- |
       |                           | -------- Welcome ----------> |
       |                           | <------- Expect ------------ |  tokenizer, before dispatch
       |                           | -------- Needed -----------> |  items that are not cached
       |                           | <------- Claim ------------- |  the items' reader
       |                           | <------- Again ------------> |  scheduler to tokenizer
       | -------- Offer ---------> |                              |
       | <- Wait, Grant, Decline - |                              |
       | -------- Payload -------> |                              |
       | <------- Ack ------------ |                              |
       | -------- Withdraw ------> |                              |  instead of a Payload
       |                           | --- AskPrefix, Settled ----> |
       |                           | -------- Arrived ----------> |  an item before the others
       |                           | <------- TakePart ---------- |  answered by a Settled
       |                           | <- Fail, Cancel, Abandon --- |

A ticket is an unguessable capability: a peer that names it may deliver that request's
items, and no other can.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

import msgspec

from sglang_epd.errors import ProtocolError
from sglang_epd.modality import MODALITIES
from sglang_epd.wire.envelope import open_envelope, seal

# A layout is some hundred bytes, a long video's timestamps some thousand.
MAX_HEADER_BYTES = 256 << 10
# The control channel joins processes that trust each other; a Settled holds the layouts
# of all of a request's items.
MAX_CONTROL_BYTES = 64 << 20
# A payload on the channel itself comes in frames of at most this: more than a few would
# have to be buffered before their ticket is looked at.
MAX_CHUNK_BYTES = 1 << 20
MAX_ITEMS = 4096
# A grid has an entry or a few, of one to three extents.
_MAX_GRID_ENTRIES = 4096
_MAX_GRID_EXTENTS = 3
# Prompts are allocated by these numbers; no model's context comes near them.
_MAX_TOKENS = 1 << 22
_MAX_PATCHES = 1 << 26
# An item's metadata is lists of numbers, by name.
_MAX_EXTRA_DEPTH = 32
KEY_BYTES = 32

# Errors of msgspec for a peer's bytes: its own, and for
# text that is not UTF-8 or nested too deeply the interpreter's.
MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)

# Reasons of a Decline. Each tells the encoder whether the work was wasted.
DECLINE_UNKNOWN = "unknown"  # no such ticket or item, or none that is remembered
DECLINE_UNREADABLE = "unreadable"  # its layout cannot be read, or is none
DECLINE_CANCELLED = "cancelled"  # the request has ended
DECLINE_DUPLICATE = "duplicate"  # that item is here already
DECLINE_COVERED = "covered"  # the prefix cache has its KV
DECLINE_CACHED = "cached"  # another request's embedding of that key is here
DECLINE_TOO_LARGE = "too_large"  # larger than this receiver may ever hold

# Errors of an Ack, both of which leave the item open.
ACK_NOT_GRANTED = "not_granted"  # the grant expired, was replaced, or never was
ACK_MALFORMED = "malformed"  # not the bytes that were granted


def _is_shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(
        _is_shallow(one, depth - 1) for one in inner if isinstance(one, dict | list)
    )


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor frame's dtype (torch name without the prefix) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True):
    """Everything a prompt needs to know of an item except its embedding.

    Attributes:
        modality: a name of `modality.MODALITIES`.
        embedding: dtype and shape [tokens, width] of the embedding.
        grid: the processor's grid of the item, one row an entry
            ([t, h, w] in patches for images and videos, [length] for audio).
        extra: per-item metadata that the model's processor asks for
            (`video_timestamps`, `second_per_grid_ts`), JSON-like.
    """

    modality: str
    embedding: TensorSpec
    # An empty list is one byte on the wire and some sixty in memory.
    grid: Annotated[
        list[Annotated[list[int], msgspec.Meta(max_length=_MAX_GRID_EXTENTS)]],
        msgspec.Meta(max_length=_MAX_GRID_ENTRIES),
    ]
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        # Messages of more depth carry it, to readers with less of a stack.
        if self.extra and not _is_shallow(self.extra, _MAX_EXTRA_DEPTH):
            raise ValueError("extra metadata is nested too deeply")

    @property
    def tokens(self) -> int:
        return self.embedding.shape[0]


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all messages."""


class Inline(msgspec.Struct, frozen=True, tag="inline"):
    """The payload comes as frames on the channel, each of at most MAX_CHUNK_BYTES."""


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """Write into memory that both processes map.

    Attributes:
        path: the memory as a file, below /proc.
        size: bytes of the whole of it.
        seal: random bytes that it begins with, so that no other file is written to.
        offset: where the payload goes, in bytes.
    """

    path: str
    size: int
    seal: bytes
    offset: int


class Remote(msgspec.Struct, frozen=True, tag="remote"):
    """Write to `address` of `session` through the engine that the offer named."""

    session: str
    address: int


Landing = Inline | Shared | Remote


class Offer(Message, frozen=True, tag="offer"):
    """Encoder: item `item` of `ticket` has this layout and key; may I send it?

    Attributes:
        process: the encoder's process, as `transfer.host` names it; empty if it cannot
            share memory.
        engine: the transfer engine that the encoder can write through (`transfer.mooncake`);
            empty for none.
        renewal: an earlier grant was lost; another encoder may have been asked since,
            and is not to be replaced.
    """

    ticket: str
    item: int
    key: bytes
    layout: Layout
    nbytes: int
    process: str = ""
    engine: str = ""
    renewal: bool = False


class UnreadOffer(Message, frozen=True, tag="offer"):
    """An Offer whose layout is not read before its ticket is known: any peer may send one."""

    ticket: str
    item: int
    key: bytes
    layout: msgspec.Raw
    nbytes: int
    process: str = ""
    engine: str = ""
    renewal: bool = False

    def read(self) -> Offer:
        """The offer.

        Raises:
            ProtocolError: it is not well-formed.
        """
        try:
            layout = _LAYOUT_DECODER.decode(self.layout)
        except MALFORMED as error:
            raise ProtocolError(f"offer: malformed layout: {error}") from None
        offer = Offer(**{**msgspec.structs.asdict(self), "layout": layout})
        _check_offer(offer)
        return offer


class Wait(Message, frozen=True, tag="wait"):
    """Receiver: no memory now; a Grant or Decline follows when there is."""

    ticket: str
    item: int


class Grant(Message, frozen=True, tag="grant"):
    """Receiver: memory is reserved under `grant` for `ttl_s`; send the payload there.

    Where no time is left it is a question: an encoder that may not write under it any more,
    or never knew of it, answers with a Withdraw.
    """

    ticket: str
    item: int
    grant: int
    ttl_s: float
    landing: Landing


class Decline(Message, frozen=True, tag="decline"):
    """Receiver: do not send; `reason` is one of the DECLINE_ constants."""

    ticket: str
    item: int
    reason: str


class Payload(Message, frozen=True, tag="payload"):
    """Encoder: bytes of the embedding, or word that they have been written.

    Attributes:
        offset: where the one frame that follows belongs in the payload; frames come in
            order. None follows where the grant's landing was memory. Without a frame, and where
            more is to come: so many bytes are there.
        last: nothing more comes.
    """

    ticket: str
    item: int
    grant: int
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    last: bool = True


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Encoder: nothing was or will be written under this grant any more."""

    ticket: str
    item: int
    grant: int


class Ack(Message, frozen=True, tag="ack"):
    """Receiver: the payload was taken (`error` empty) or dropped (an ACK_ constant)."""

    ticket: str
    item: int
    grant: int
    error: str = ""


class Hello(Message, frozen=True, tag="hello"):
    """Where do encoders reach you, and where do their payloads lie?"""


class Welcome(Message, frozen=True, tag="welcome"):
    """Receiver: the payload channel's endpoint, as encoders are to dial it, and the
    memory that payloads lie in: its path, size, seal and number of readers."""

    endpoint: str
    path: str
    size: int
    seal: bytes
    readers: int


class Expect(Message, frozen=True, tag="expect"):
    """Tokenizer: a request with `items` items is on its way.

    Attributes:
        ttl_s: seconds from now until the request's deadline.
        keys: of each item; empty where it is unknown, or where the item is being sent
            for already. Of the others a `Needed` says whether to. None for no item.
        layouts: of each item, where all are known: the prefix cache is asked before anything
            is sent, and a `Needed` follows the first claim.
        announcer: the tokenizer process that announced it, to receive `Again` should its items be
            needed after all.
        trace: W3C's `traceparent` of the media's span; empty for none.
        waits: whether the tokenizer keeps the request until an item has landed, and is told then.
    """

    ticket: str
    items: int
    ttl_s: float
    keys: tuple[bytes, ...] = ()
    layouts: tuple[Layout, ...] = ()
    announcer: str = ""
    trace: str = ""
    waits: bool = False


class Claim(Message, frozen=True, tag="claim"):
    """A request asks for the items of a ticket.

    Attributes:
        claim: the asker's name for it; unique among its own.
        first_reader, readers: the processes that will read the items.
        covered: items whose KV the asker has, so that it needs no embedding.
        prefix: whether the asker has a prefix cache to look into, should all layouts become
            known (`AskPrefix`).
        early: whether the asker is told of each item as it lands (`Arrived`).
    """

    claim: str
    expect: Expect
    first_reader: Annotated[int, msgspec.Meta(ge=0)]
    readers: Annotated[int, msgspec.Meta(ge=1)]
    covered: tuple[int, ...] = ()
    prefix: bool = False
    early: bool = False


class Arrived(Message, frozen=True, tag="arrived"):
    """Receiver: an item of an early claim is here, or its first rows are; others are not.

    Attributes:
        tokens: that are here.
        whole: whether these are all of it.
        elsewhere: whether another encoder than its own is to send an item of the claim.
    """

    claim: str
    item: int
    tokens: int
    whole: bool = True
    elsewhere: bool = False


class TakePart(Message, frozen=True, tag="take_part"):
    """The asker of a claim wants some of its items before the others are here. A Settled with
    the given name answers; the claim stays, and will have all of its items.

    Attributes:
        begun: one of them, of which the first rows will do; -1 for none.
    """

    ticket: str
    claim: str
    name: str
    items: tuple[int, ...]
    begun: int = -1


class AskPrefix(Message, frozen=True, tag="laid"):
    """Receiver: these are the items of a claim, which this server has seen before. The claim
    is void; another is to say which of them the prefix cache covers."""

    claim: str
    keys: tuple[bytes, ...]
    layouts: tuple[Layout, ...]


class Again(Message, frozen=True, tag="again"):
    """Scheduler to the tokenizer that announced a request, through the receiver: its items
    are needed after all, and are announced herewith.

    Attributes:
        rid: SGLang's id of the request.
    """

    rid: str
    expect: Expect


class Landed(msgspec.Struct, frozen=True):
    """An item that is there.

    Attributes:
        nbytes: of it; of a part of a prompt that ends within it, of its first rows.
        slot: where readers say that they are done with it.
        offset: where its embedding begins in the shared memory, in bytes.
    """

    key: bytes
    layout: Layout
    nbytes: int
    slot: int
    offset: int


class Settled(Message, frozen=True, tag="settled"):
    """Receiver: a claim has its items, or an error (`code` not empty).

    An item that the claim covers itself is None. Where both an error and items are there,
    the claimant reads none of the items, and gives them back.
    """

    claim: str
    items: tuple[Landed | None, ...] = ()
    code: str = ""
    message: str = ""


class Beginning(Message, frozen=True, tag="beginning"):
    """Leading rank to the ranks: the request that carries this is the beginning of another's
    prompt, to be prefilled into the prefix cache.

    Attributes:
        of: the name of the other request; empty if that is over, and the part's items are only
            to be given back.
        items: the numbers of the items that the part has, in ascending order.
        landed: each of them; None where the prefix cache had it.
        least: new tokens, beside what the prefix cache has, that it is run for.
    """

    of: str
    items: tuple[int, ...]
    landed: tuple[Landed | None, ...]
    least: int = 1


class Needed(Message, frozen=True, tag="needed"):
    """Receiver to the tokenizer: have these items encoded.

    The first answers an `Expect`; another follows where an item that was here had to make
    room before it was used.

    Attributes:
        begun: the first item has landed of a request that its tokenizer keeps, and nothing else
            is said.
        over: the request needs nothing any more.
        aborted: of a request that is over: before its items had come.
        covered, cached: of a request that is over, how many items its first claim had in
            the prefix cache, and how many were here for another's sake.
    """

    ticket: str
    items: tuple[int, ...] = ()
    begun: bool = False
    over: bool = False
    aborted: bool = False
    covered: int = 0
    cached: int = 0


class Abandon(Message, frozen=True, tag="abandon"):
    """The request behind a claim is over."""

    claim: str


class Fail(Message, frozen=True, tag="fail"):
    """Tokenizer: no encoder could deliver; the request ends with this error."""

    ticket: str
    code: str
    message: str


class Cancel(Message, frozen=True, tag="cancel"):
    """Tokenizer: the client went away."""

    ticket: str


_ToEncoders = Wait | Grant | Decline | Ack
_ToReceiver = Hello | Expect | Claim | TakePart | Fail | Cancel | Abandon
_FromReceiver = Welcome | Needed | AskPrefix | Arrived | Settled
_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M")
_DECODER = msgspec.msgpack.Decoder(
    Offer | Payload | Withdraw | _ToEncoders | _ToReceiver | _FromReceiver | Again | Beginning
)
_ENCODERS_DECODER = msgspec.msgpack.Decoder(UnreadOffer | Payload | Withdraw)
_LAYOUT_DECODER = msgspec.msgpack.Decoder(Layout)


def encode_message(message: Message) -> bytes:
    """Encode to one frame, envelope included."""
    return seal(_ENCODER.encode(message))


def decode_message(frame: bytes | memoryview, max_bytes: int = MAX_HEADER_BYTES) -> Message:
    """Decode one frame.

    Raises:
        ProtocolError: for anything that is not a well-formed message of this
            major version within its bounds.
    """
    message = _decode(_DECODER, frame, max_bytes)
    if isinstance(message, Offer):
        _check_offer(message)
    elif isinstance(message, Expect):
        _check_expect(message)
    elif isinstance(message, Claim):
        _check_expect(message.expect)
        if any(not 0 <= item < message.expect.items for item in message.covered):
            raise ProtocolError("claim: covers items that the request does not have")
    elif isinstance(message, Again):
        _check_expect(message.expect)
        if not message.expect.announcer:
            raise ProtocolError("again: it is not said who announced the request")
    return message


def decode_from_encoder(frame: bytes | memoryview) -> UnreadOffer | Payload | Withdraw:
    """Decode one frame of the payload port; no other messages belong there.

    Costs about as much memory as the frame has bytes.

    Raises:
        ProtocolError: for anything else.
    """
    return _decode(_ENCODERS_DECODER, frame, MAX_HEADER_BYTES)


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes | memoryview, max_bytes: int) -> M:
    body = open_envelope(frame, max_bytes)
    try:
        return decoder.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"malformed message: {error}") from None


def _check_expect(expect: Expect) -> None:
    if not (0 < expect.items <= MAX_ITEMS and 0 < expect.ttl_s < float("inf")):
        raise ProtocolError("expect: items or ttl out of range")
    if expect.keys and len(expect.keys) != expect.items:
        raise ProtocolError(f"expect: {len(expect.keys)} keys of {expect.items} items")
    if expect.layouts and not (len(expect.layouts) == expect.items and all(expect.keys)):
        raise ProtocolError("expect: layouts are told of all items and with keys, or of none")
    if any(len(key) not in (0, KEY_BYTES) for key in expect.keys):
        raise ProtocolError("expect: a key of the wrong length")


def _check_offer(offer: Offer) -> None:
    if not 0 <= offer.item < MAX_ITEMS:
        raise ProtocolError(f"offer: item {offer.item} out of range")
    if len(offer.key) != KEY_BYTES:
        raise ProtocolError(f"offer: key of {len(offer.key)} bytes")
    try:
        check_layout(offer.layout)
    except ValueError as error:
        raise ProtocolError(f"offer: {error}") from None


def check_layout(layout: Layout) -> None:
    """Check that a prompt can be laid out by what an encoder told.

    Raises:
        ValueError: it cannot, or would take the memory of a server.
    """
    shape = layout.embedding.shape
    if layout.modality not in MODALITIES:
        raise ValueError("no such modality")
    if len(shape) != 2 or min(shape) <= 0 or shape[0] > _MAX_TOKENS:
        raise ValueError(f"embedding shape {shape}")
    if not layout.grid or any(not 1 <= len(row) <= 3 or min(row) <= 0 for row in layout.grid):
        raise ValueError("the grid is not of one to three positive extents an entry")
    if sum(math.prod(row) for row in layout.grid) > _MAX_PATCHES:
        raise ValueError(f"a grid of more than {_MAX_PATCHES} patches")
