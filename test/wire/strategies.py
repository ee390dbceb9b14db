"""Hypothesis strategies for messages."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from sglang_epd.modality import MODALITIES
from sglang_epd.wire import http
from sglang_epd.wire import messages as wire

# What msgpack and JSON have in common, as it comes back from decoding.
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
tickets = st.text(max_size=24)
numbers = st.integers(-(2**63), 2**64 - 1)
item_numbers = st.integers(0, wire.MAX_ITEMS - 1)
seconds = st.floats(1e-3, 1e6)

specs = st.builds(
    wire.TensorSpec,
    dtype=st.sampled_from(("float32", "bfloat16", "float16", "int8", "")),
    shape=st.tuples(st.integers(1, 2**22), st.integers(1, 2**40)),
)
layouts = st.builds(
    wire.Layout,
    modality=st.sampled_from(tuple(MODALITIES)),
    embedding=specs,
    grid=st.lists(st.lists(st.integers(1, 256), min_size=1, max_size=3), min_size=1, max_size=3),
    extra=st.dictionaries(st.text(max_size=4), json_like, max_size=2),
)
keys = st.binary(min_size=wire.KEY_BYTES, max_size=wire.KEY_BYTES)
short, long = st.text(max_size=8), st.text(max_size=24)
FIELDS = {
    **dict.fromkeys(("size", "offset", "address", "nbytes", "slot"), numbers),
    **dict.fromkeys(("item", "grant", "covered", "cached", "tokens", "least"), numbers),
    **dict.fromkeys(("path", "session", "process", "endpoint"), long),
    **dict.fromkeys(
        ("engine", "reason", "error", "claim", "rid", "code", "message", "name", "of"), short
    ),
    **dict.fromkeys(("renewal", "last", "prefix", "over", "early"), st.booleans()),
    "seal": st.binary(max_size=32),
    "ticket": tickets,
    "ttl_s": seconds,
    "key": keys,
    "layout": layouts,
}


def of(kind: type, **special: st.SearchStrategy) -> st.SearchStrategy:
    """Bodies of a kind, with each field as its name says or as `special` does."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **{name: FIELDS[name] for name in names & FIELDS.keys()} | special)


landings = st.just(wire.Inline()) | of(wire.Shared) | of(wire.Remote)
expects = of(wire.Expect, items=st.integers(1, wire.MAX_ITEMS))
by_encoders = st.one_of(
    of(wire.Offer, item=item_numbers),
    of(wire.Payload, offset=st.integers(0, 2**63)),
    of(wire.Withdraw),
)
to_encoders = of(wire.Wait) | of(wire.Grant, landing=landings) | of(wire.Decline) | of(wire.Ack)
described_expects = st.builds(
    lambda ticket, told, complete, announcer: wire.Expect(
        ticket,
        len(told),
        1.0,
        tuple(key for key, _ in told),
        tuple(layout for _, layout in told) if complete else (),
        announcer,
    ),
    ticket=tickets,
    told=st.lists(st.tuples(keys, layouts), min_size=1, max_size=3),
    complete=st.booleans(),
    announcer=st.text(min_size=1, max_size=16),
)
within_a_server = st.one_of(
    st.just(wire.Hello()),
    of(wire.Welcome, readers=numbers),
    expects,
    of(
        wire.Claim,
        expect=expects,
        first_reader=st.integers(0, 2**31),
        readers=st.integers(1, 2**31),
        covered=st.sampled_from([(), (0,)]),
    ),
    described_expects,
    of(wire.Again, expect=described_expects),
    of(
        wire.AskPrefix,
        keys=st.lists(keys, max_size=2).map(tuple),
        layouts=st.lists(layouts, max_size=2).map(tuple),
    ),
    of(wire.Arrived),
    of(wire.TakePart, items=st.lists(numbers, max_size=3).map(tuple)),
    of(
        wire.Beginning,
        items=st.lists(numbers, max_size=2).map(tuple),
        landed=st.lists(st.none() | of(wire.Landed), max_size=2).map(tuple),
    ),
    of(wire.Needed, items=st.lists(numbers, max_size=3).map(tuple)),
    of(wire.Settled, items=st.lists(st.none() | of(wire.Landed), max_size=2).map(tuple)),
    of(wire.Abandon),
    of(wire.Fail),
    of(wire.Cancel),
)
any_message = by_encoders | to_encoders | within_a_server


def _item(number: int, modality: str, inline: bool, content: bytes) -> http.EncodeItem:
    where = {"data": content} if inline else {"url": content.hex()}
    return http.EncodeItem(number, modality, f"item {number}", **where, options={"a": [1]})


items = st.builds(
    _item,
    number=item_numbers,
    modality=st.sampled_from(tuple(MODALITIES)),
    inline=st.booleans(),
    content=st.binary(max_size=8),
)
requests = st.builds(
    http.EncodeRequest,
    request_id=st.text(min_size=1, max_size=16),
    namespace=st.text(max_size=16),
    ttl_s=seconds,
    reply_to=st.builds(http.ReplyTo, endpoint=st.text(max_size=8), ticket=tickets),
    items=st.lists(items, min_size=1, max_size=4, unique_by=lambda item: item.item),
)
replies = st.builds(
    http.EncodeReply,
    request_id=st.text(max_size=16),
    encoder=st.text(max_size=16),
    outcomes=st.lists(
        st.builds(
            http.ItemOutcome,
            item=item_numbers,
            state=st.sampled_from(("delivered", "declined", "failed")),
            code=st.text(max_size=8),
            message=st.text(max_size=8),
            tokens=numbers,
            ms=st.dictionaries(st.text(max_size=4), st.floats(0, 1e9), max_size=2),
            layout=st.none() | layouts,
            key=st.binary(max_size=wire.KEY_BYTES),
        ),
        max_size=3,
    ),
)
described = st.builds(
    http.ItemLayout,
    key=keys,
    layout=st.builds(
        wire.Layout,
        modality=st.sampled_from(tuple(MODALITIES)),
        embedding=st.builds(
            wire.TensorSpec,
            dtype=st.just("float32"),
            shape=st.tuples(st.integers(1, 2**22), st.integers(1, 2**40)),
        ),
        grid=st.lists(
            st.lists(st.integers(1, 128), min_size=1, max_size=3), min_size=1, max_size=3
        ),
    ),
)
layout_replies = st.builds(
    http.LayoutReply,
    items=st.lists(described, max_size=3),
    error=st.none() | st.builds(http.ErrorReply, code=st.text(), message=st.text()),
)
