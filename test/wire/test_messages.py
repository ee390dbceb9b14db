from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_epd import wire
from sglang_epd.errors import ProtocolError
from sglang_epd.wire import messages, seal
from wire.strategies import any_message

OFFER = wire.Offer(
    "ticket",
    0,
    b"k" * 32,
    wire.Layout("IMAGE", wire.TensorSpec("float32", (2, 3)), [[1, 2, 4]]),
    24,
)
EXPECT = wire.Expect("ticket", 1, 1, 10.0)


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
def test_a_mutated_frame_is_refused_or_read(message, data):
    frame = bytearray(wire.encode_message(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(frame) - 1))
        kind = data.draw(st.sampled_from(("flip", "cut", "insert")))
        if kind == "flip":
            frame[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del frame[place : place + data.draw(st.integers(1, 4))]
        else:
            frame[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        if not frame:
            break
    refuse_or_decode(bytes(frame))


@given(any_message, st.data())
def test_a_field_of_another_type_is_refused(message, data):
    body = body_of(message)
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = {"of": "another type"}
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of(body))


@given(any_message, st.data())
def test_a_missing_field_is_refused(message, data):
    required = [name for name in body_of(message) if name not in ("error", "extra")]
    body = body_of(message)
    del body[data.draw(st.sampled_from(required))]
    with pytest.raises(ProtocolError):
        wire.decode_message(frame_of(body))


def test_an_oversized_message_is_refused():
    frame = wire.encode_message(wire.Cancel("x" * messages.MAX_HEADER_BYTES))
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
        {"item": messages.MAX_ITEMS},
        {"key": b"short"},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", []]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [4]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [4, 0]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [-4, -4]]}},
        {"layout": {**body_of(OFFER)["layout"], "embedding": ["float32", [1, 1, 1]]}},
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
        {"items": messages.MAX_ITEMS + 1},
        {"consumers": 0},
        {"ttl_s": 0.0},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
    ],
)
def test_an_expectation_out_of_bounds_is_refused(change):
    assert wire.decode_message(frame_of(body_of(EXPECT))) == EXPECT
    with pytest.raises(ProtocolError, match="expect"):
        wire.decode_message(frame_of({**body_of(EXPECT), **change}))
