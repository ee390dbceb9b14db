from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire import http
from sglang_epd.wire.envelope import seal
from sglang_epd.wire.http import (
    EncodeItem,
    EncodeReply,
    EncodeRequest,
    ErrorReply,
    ItemLayout,
    ItemOutcome,
    LayoutReply,
    ReplyTo,
    body_pieces,
    decode_body,
    encode_body,
)
from sglang_epd.wire.messages import MAX_ITEMS, Layout, TensorSpec
from wire.strategies import layout_replies, replies, requests

LIMIT = 1 << 20
KINDS = (EncodeRequest, EncodeReply, ErrorReply, LayoutReply)
ITEM = EncodeItem(0, "IMAGE", "image 1 of 1", data=b"png")
REQUEST = EncodeRequest("r", "ns", 5.0, ReplyTo("tcp://127.0.0.1:1", "ticket"), [ITEM])


def body_of(struct: msgspec.Struct) -> dict:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(struct))


@given(
    requests | replies | layout_replies | st.builds(ErrorReply, code=st.text(), message=st.text())
)
def test_every_body_comes_back_as_it_was(body):
    assert decode_body(encode_body(body), type(body), LIMIT) == body


@given(requests)
def test_media_travels_as_bytes(request):
    body = encode_body(request)
    for item in request.items:
        assert item.data is None or item.data in body


@given(requests | replies)
def test_fields_of_a_newer_minor_version_are_ignored(body):
    newer = seal(msgspec.msgpack.encode({**body_of(body), "added_later": [1]}))
    assert decode_body(newer, type(body), LIMIT) == body


@given(st.binary(max_size=200), st.sampled_from(KINDS))
@example(b"\x82\xa4code\xa1\xff\xa7message\xa1a", ErrorReply)  # text that is not UTF-8
@example(b"\x91" * 100_000, EncodeRequest)
def test_random_bytes_are_refused(data, kind):
    for body in (data, seal(data)):
        try:
            decoded = decode_body(body, kind, LIMIT)
        except ProtocolError:
            continue
        assert isinstance(decoded, kind)


@given(requests, st.data())
def test_a_mutated_body_is_refused_or_read(request, data):
    body = bytearray(encode_body(request))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_body(bytes(body), EncodeRequest, LIMIT)


def test_one_kind_is_not_taken_for_another():
    with pytest.raises(ProtocolError, match="malformed EncodeReply"):
        decode_body(encode_body(REQUEST), EncodeReply, LIMIT)


def test_an_oversized_body_is_refused():
    body = encode_body(REQUEST)
    decode_body(body, EncodeRequest, len(body))
    with pytest.raises(ProtocolError, match="limit"):
        decode_body(body, EncodeRequest, len(body) - 1)


@pytest.mark.parametrize(
    "change",
    [
        {"ttl_s": 0.0},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"items": []},
        {"items": [body_of(ITEM), body_of(ITEM)]},
        {"items": [{**body_of(ITEM), "item": -1}]},
        {"items": [{**body_of(ITEM), "item": MAX_ITEMS}]},
        {"items": [{**body_of(ITEM), "modality": "SMELL"}]},
        {"items": [{**body_of(ITEM), "data": None}]},
        {"items": [{**body_of(ITEM), "url": "http://both/"}]},
    ],
)
def test_a_request_out_of_bounds_is_refused(change):
    assert decode_body(seal(msgspec.msgpack.encode(body_of(REQUEST))), EncodeRequest, LIMIT)
    with pytest.raises(ProtocolError):
        decode_body(
            seal(msgspec.msgpack.encode({**body_of(REQUEST), **change})), EncodeRequest, LIMIT
        )


def test_an_outcome_of_an_older_encoder_has_no_layout():
    older = {"request_id": "r", "encoder": "e", "outcomes": [{"item": 0, "state": "delivered"}]}
    reply = decode_body(seal(msgspec.msgpack.encode(older)), EncodeReply, LIMIT)
    assert reply.outcomes == [ItemOutcome(0, "delivered", layout=None, key=b"")]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"key": b"short"}, "key of 5 bytes"),
        ({"modality": "SMELL"}, "no such modality"),
        ({"shape": ()}, "embedding shape"),
        ({"shape": (6,)}, "embedding shape"),
        ({"shape": (0, 4)}, "embedding shape"),
        ({"shape": (1 << 40, 4)}, "embedding shape"),
        ({"grid": []}, "the grid"),
        ({"grid": [[]]}, "the grid"),
        ({"grid": [[1, 2, -3]]}, "the grid"),
        ({"grid": [[2] * 1000]}, "grid"),
        ({"grid": [[1, 2, 3], [1, 1 << 20, 1 << 20]]}, "patches"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changed, why):
    told = {"key": bytes(32), "modality": "IMAGE", "shape": (6, 4), "grid": [[1, 2, 3]], **changed}
    layout = Layout(told["modality"], TensorSpec("float32", told["shape"]), told["grid"])
    with pytest.raises(ValueError, match=why):
        ItemLayout(told["key"], layout)
    sent = msgspec.msgpack.encode({"items": [{"key": told["key"], "layout": layout}]})
    with pytest.raises(ProtocolError, match=why):
        decode_body(seal(sent), LayoutReply, LIMIT)


@given(requests, st.integers(0, 40))
def test_pieces_are_the_body(request, copied):
    before, http._COPIED_BYTES = http._COPIED_BYTES, copied
    try:
        pieces = body_pieces(request)
    finally:
        http._COPIED_BYTES = before
    assert decode_body(b"".join(pieces), EncodeRequest, LIMIT) == request


def test_large_media_are_not_copied_into_their_body():
    data, small = bytes(1 << 20), b"small"
    items = [EncodeItem(0, "IMAGE", "a", data=data), EncodeItem(1, "IMAGE", "b", data=small)]
    request = msgspec.structs.replace(REQUEST, items=items)
    pieces = body_pieces(request)
    assert any(piece is data for piece in pieces)
    assert b"".join(pieces) == encode_body(request)


def test_media_are_hashed_once(monkeypatch):
    item = EncodeItem(0, "IMAGE", "a", data=b"data")
    first = item.digest
    monkeypatch.setattr(http, "blake3", None)
    assert item.digest is first
    assert EncodeItem(0, "IMAGE", "a", url="http://h/").digest == b""
