from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire import messages as wire
from sglang_epd.wire.envelope import seal
from wire.strategies import any_message

OFFER = wire.Offer(
    "ticket",
    0,
    b"k" * 32,
    wire.Layout("IMAGE", wire.TensorSpec("float32", (2, 3)), [[1, 2, 4]]),
    24,
)
EXPECT = wire.Expect("ticket", 1, 10.0)
CLAIM = wire.Claim("claim", EXPECT, first_reader=0, readers=1)
PAYLOAD = wire.Payload("ticket", 0, 1)
# Fields that a message may leave out.
OPTIONAL = {
    field.name
    for kind in wire.Message.__subclasses__()
    for field in msgspec.structs.fields(kind)
    if not field.required
}


def body_of(message: wire.Message) -> dict:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def frame_of(body: object) -> bytes:
    return seal(msgspec.msgpack.encode(body))


def refuse_or_decode(frame: bytes) -> None:
    """Nothing but a ProtocolError may come of a frame."""
    try:
        message = wire.decode_message(frame)
    except ProtocolError:
        return
    assert isinstance(message, wire.Message)


@given(any_message)
def test_every_message_comes_back_as_it_was(message):
    assert wire.decode_message(wire.encode_message(message)) == message


@given(any_message)
def test_fields_of_a_newer_minor_version_are_ignored(message):
    body = {**body_of(message), "added_later": {"a": [1]}}
    assert wire.decode_message(frame_of(body)) == message


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x82\xa1t\xa6cancel\xa6ticket\xa1\xff")  # text that is not UTF-8
@example(b"\x82\xa1t\xa1\xff\xa6ticket\xa1a")
@example(b"\x91" * 100_000)  # nested too deeply
@example(b"\xdd\xff\xff\xff\xff")  # a list of four thousand million entries
def test_random_bytes_are_refused(body):
    refuse_or_decode(body)
    refuse_or_decode(seal(body))


@given(any_message, st.data())
def test_a_field_of_another_type_is_refused(message, data):
    body = body_of(message)
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = {"of": "another type"}
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of(body))


@given(any_message, st.data())
def test_a_missing_field_is_refused(message, data):
    body = body_of(message)
    required = [name for name in body if name not in OPTIONAL]
    del body[data.draw(st.sampled_from(required))]
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of(body))


@pytest.mark.parametrize(
    "message",
    [
        wire.Expect("t", 2, 1.0, (b"k" * 32,)),
        wire.Expect("t", 1, 1.0, (b"short",)),
        wire.Expect("t", 1, 1.0, (b"",), (OFFER.layout,)),
        wire.Expect("t", 1, 1.0, (b"k" * 32,), (OFFER.layout,) * 2),
        wire.Claim("c", EXPECT, 0, 1, covered=(1,)),
        wire.Claim("c", EXPECT, 0, 1, covered=(-1,)),
        wire.Again("r", wire.Expect("t", 0, 1.0, announcer="a")),
        wire.Again("r", EXPECT),
    ],
)
def test_announcements_that_contradict_themselves_are_refused(message):
    with pytest.raises(ProtocolError):
        wire.decode_message(wire.encode_message(message))


def test_an_oversized_message_is_refused():
    frame = wire.encode_message(wire.Cancel("x" * wire.MAX_HEADER_BYTES))
    with pytest.raises(ProtocolError, match="limit"):
        wire.decode_message(frame)


@pytest.mark.parametrize("body", [None, 1, "text", [], [1], {}, {"t": "nothing"}, {"t": 3}])
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of(body))


@pytest.mark.parametrize(
    "change",
    [
        {"item": -1},
        {"item": wire.MAX_ITEMS},
        {"key": b"short"},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", []]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [4]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [4, 0]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [-4, -4]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [1, 1, 1]]}},
        {"layout": {**body_of(OFFER)["layout"], "modality": "SMELL"}},
        {"layout": {**body_of(OFFER)["layout"], "grid": [[1, 1 << 16, 1 << 16]]}},
        {"layout": {**body_of(OFFER)["layout"], "grid": [[1, 2, 0]]}},
    ],
)
def test_an_offer_out_of_bounds_is_refused(change):
    assert wire.decode_message(frame_of(body_of(OFFER))) == OFFER
    with pytest.raises(ProtocolError, match="offer"):
        wire.decode_message(frame_of({**body_of(OFFER), **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"items": 0},
        {"items": wire.MAX_ITEMS + 1},
        {"ttl_s": 0.0},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
    ],
)
def test_an_expectation_out_of_bounds_is_refused(change):
    assert wire.decode_message(frame_of(body_of(EXPECT))) == EXPECT
    changed = {**body_of(EXPECT), **change}
    with pytest.raises(ProtocolError, match="expect"):
        wire.decode_message(frame_of(changed))
    with pytest.raises(ProtocolError, match="expect"):
        wire.decode_message(frame_of({**body_of(CLAIM), "expect": changed}))


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (CLAIM, "first_reader", -1),
        (CLAIM, "readers", 0),
        (CLAIM, "readers", -1),
        (PAYLOAD, "offset", -1),
    ],
)
def test_numbers_out_of_bounds_are_refused(message, field, value):
    assert wire.decode_message(frame_of(body_of(message))) == message
    with pytest.raises(ProtocolError, match=field):
        wire.decode_message(frame_of({**body_of(message), field: value}))


def test_encoders_name_no_negative_place():
    with pytest.raises(ProtocolError, match="offset"):
        wire.decode_from_encoder(frame_of({**body_of(PAYLOAD), "offset": -1}))


@pytest.mark.parametrize("landing", [{}, {"type": "carrier pigeon"}, {"type": "shared"}, None])
def test_an_unknown_way_is_refused(landing):
    body = body_of(wire.Grant("ticket", 0, 1, 5.0, wire.Inline()))
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of({**body, "landing": landing}))


def test_what_an_older_minor_version_leaves_out_is_filled_in():
    body = {name: value for name, value in body_of(OFFER).items() if name not in OPTIONAL}
    back = wire.decode_message(frame_of(body))
    assert (back.process, back.engine, back.renewal) == ("", "", False)


def test_the_control_channel_takes_more_than_the_payload_channel():
    layout = wire.Layout("VIDEO", OFFER.layout.embedding, [], {"times": "x" * 1000})
    landed = wire.Landed(OFFER.key, layout, 24, slot=1, offset=4096)
    settled = wire.Settled("claim", (landed,) * 300)
    frame = wire.encode_message(settled)
    assert wire.decode_message(frame, wire.MAX_CONTROL_BYTES) == settled
    with pytest.raises(ProtocolError, match="limit"):
        wire.decode_message(frame)


def test_every_header_fits_where_chunks_do():
    """The receiver's sockets refuse frames longer than either."""
    assert wire.MAX_HEADER_BYTES <= wire.MAX_CHUNK_BYTES <= wire.MAX_CONTROL_BYTES


def test_metadata_is_not_nested_deeper_than_a_reader_can_follow():
    """A peer's reader may have less of a stack left, and an outcome carries it for others."""
    extra = []
    for _ in range(31):
        extra = [extra]
    spec = wire.TensorSpec("float32", (1, 1))
    told = msgspec.msgpack.encode(wire.Layout("IMAGE", spec, [], {"a": extra[0]}))
    msgspec.msgpack.decode(told, type=wire.Layout)
    with pytest.raises(ValueError, match="nested too deeply"):
        wire.Layout("IMAGE", spec, [], {"a": extra})
    deeper = told.replace(b"\xa1a", b"\xa1a\x91")
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        msgspec.msgpack.decode(deeper, type=wire.Layout)
