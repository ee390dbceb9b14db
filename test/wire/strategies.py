"""Hypothesis strategies for messages."""

from __future__ import annotations

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
    shape=st.tuples(st.integers(1, 2**40), st.integers(1, 2**40)),
)
layouts = st.builds(
    wire.Layout,
    modality=st.sampled_from(tuple(MODALITIES)) | st.text(max_size=8),
    embedding=specs,
    grid=st.lists(st.lists(st.integers(0, 2**32), max_size=3), max_size=3),
    extra=st.dictionaries(st.text(max_size=4), json_like, max_size=2),
)
landings = st.one_of(
    st.just(wire.Inline()),
    st.builds(
        wire.Shared,
        path=st.text(max_size=24),
        size=numbers,
        seal=st.binary(max_size=32),
        offset=numbers,
    ),
    st.builds(wire.Remote, session=st.text(max_size=24), address=numbers),
)
keys = st.binary(min_size=wire.KEY_BYTES, max_size=wire.KEY_BYTES)
expects = st.builds(
    wire.Expect,
    ticket=tickets,
    items=st.integers(1, wire.MAX_ITEMS),
    consumers=st.integers(1, 2**31),
    ttl_s=seconds,
)
landed = st.builds(
    wire.Landed,
    key=st.binary(max_size=8),
    layout=layouts,
    nbytes=numbers,
    slot=numbers,
    offset=numbers,
)
by_encoders = st.one_of(
    st.builds(
        wire.Offer,
        ticket=tickets,
        item=item_numbers,
        key=keys,
        layout=layouts,
        nbytes=numbers,
        process=st.text(max_size=24),
        engine=st.text(max_size=8),
        renewal=st.booleans(),
    ),
    st.builds(
        wire.Payload,
        ticket=tickets,
        item=numbers,
        grant=numbers,
        offset=st.integers(0, 2**63),
        last=st.booleans(),
        checksum=st.binary(max_size=32),
    ),
    st.builds(wire.Withdraw, ticket=tickets, item=numbers, grant=numbers),
)
to_encoders = st.one_of(
    st.builds(wire.Wait, ticket=tickets, item=numbers),
    st.builds(
        wire.Grant, ticket=tickets, item=numbers, grant=numbers, ttl_s=seconds, landing=landings
    ),
    st.builds(wire.Decline, ticket=tickets, item=numbers, reason=st.text(max_size=8)),
    st.builds(wire.Ack, ticket=tickets, item=numbers, grant=numbers, error=st.text(max_size=8)),
)
described_expects = st.builds(
    lambda ticket, told, complete, announcer: wire.Expect(
        ticket,
        len(told),
        1,
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
    st.builds(
        wire.Welcome,
        endpoint=st.text(max_size=24),
        path=st.text(max_size=24),
        size=numbers,
        seal=st.binary(max_size=32),
        readers=numbers,
    ),
    expects,
    st.builds(
        wire.Claim,
        claim=st.text(max_size=8),
        expect=expects,
        first_reader=st.integers(0, 2**31),
        readers=st.integers(1, 2**31),
        covered=st.sampled_from([(), (0,)]),
        prefix=st.booleans(),
    ),
    described_expects,
    st.builds(wire.Again, rid=st.text(max_size=8), expect=described_expects),
    st.builds(
        wire.AskPrefix,
        claim=st.text(max_size=8),
        keys=st.lists(keys, max_size=2).map(tuple),
        layouts=st.lists(layouts, max_size=2).map(tuple),
    ),
    st.builds(
        wire.Needed,
        ticket=tickets,
        items=st.lists(numbers, max_size=3).map(tuple),
        over=st.booleans(),
        covered=numbers,
        cached=numbers,
    ),
    st.builds(
        wire.Settled,
        claim=st.text(max_size=8),
        items=st.lists(st.none() | landed, max_size=2).map(tuple),
        code=st.text(max_size=8),
        message=st.text(max_size=8),
    ),
    st.builds(wire.Abandon, claim=st.text(max_size=8)),
    st.builds(wire.Fail, ticket=tickets, code=st.text(max_size=8), message=st.text(max_size=8)),
    st.builds(wire.Cancel, ticket=tickets),
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
