from __future__ import annotations

import base64
import contextlib
from types import SimpleNamespace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.language import manifest
from sglang_epd.wire.messages import (
    MAX_HEADER_BYTES,
    MAX_ITEMS,
    Cancel,
    Expect,
    Landed,
    Layout,
    Settled,
    TensorSpec,
    encode_message,
)

SECRET = bytes(range(32))
EXPECT = Expect("ticket", 3, 60.0)
LAYOUT = Layout("IMAGE", TensorSpec("bfloat16", (7, 8)), [[1, 2, 14]], {"fps": [2.0]})
SETTLED = Settled("4", (Landed(b"k" * 32, LAYOUT, 112, 5, 4096),))
READERS = [manifest.read_announced, manifest.read_settled]
SIDES = list(zip(READERS, (EXPECT, SETTLED), strict=True))
READER_OF = dict(zip((Expect, Settled), READERS, strict=True))
counts = st.integers(0, 2**40)


def signed(frame: bytes) -> str:
    """A frame as this server would have written it."""
    return base64.b64encode(blake3(frame, key=SECRET).digest() + frame).decode()


expects = st.builds(
    Expect,
    ticket=st.text(max_size=24),
    items=st.integers(1, 4096),
    ttl_s=st.floats(1e-3, 1e6),
)
landed = st.builds(Landed, st.binary(max_size=32), st.just(LAYOUT), counts, counts, counts)
outcomes = st.builds(
    Settled,
    claim=st.text(max_size=24),
    items=st.lists(landed, max_size=3).map(tuple),
    code=st.text(max_size=24),
    message=st.text(max_size=99),
)


@given(expects | outcomes)
def test_a_manifest_is_read_as_it_was_written(message):
    written = manifest.write(message, SECRET)
    assert all(isinstance(part, str) and part.isascii() for part in written)
    assert READER_OF[type(message)](written, SECRET) == message


def test_an_outcome_may_be_of_as_many_items_as_a_request_has():
    long = Layout("VIDEO", LAYOUT.embedding, [[1, 2, 14]], {"video_timestamps": [0.5] * 50})
    items = tuple(Landed(b"k" * 32, long, 112, n, n) for n in range(MAX_ITEMS))
    written = manifest.write(Settled("1", items), SECRET)
    assert manifest.read_settled(written, SECRET).items == items


def test_one_is_not_taken_for_the_other():
    with pytest.raises(ProtocolError, match="something else than a manifest"):
        manifest.read_announced(manifest.write(SETTLED, SECRET), SECRET)
    with pytest.raises(ProtocolError, match="something else than an outcome"):
        manifest.read_settled(manifest.write(EXPECT, SECRET), SECRET)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "encoder_urls",
    [
        None,
        [],
        [""],
        ["http://encoder:30000"],
        ["x"],
        ["é"],
        ["====", "AAAA"],
        [None],
        [7],
        [["nested"]],
        [{}],
        [base64.b64encode(encode_message(Cancel("ticket"))).decode()],
        [base64.b64encode(b"EPD\x01\x00\xa1\xff").decode()],
        [base64.b64encode(encode_message(EXPECT)).decode()],
        [base64.b64encode(bytes(32) + encode_message(EXPECT)).decode()],
        [base64.b64encode(blake3(encode_message(EXPECT)).digest()).decode()],
        [base64.b64encode(blake3(b"", key=SECRET).digest()).decode()],
        [signed(b"EPD\x01\x00\xa1\xff")],
        [signed(encode_message(Cancel("ticket")))],
        "a string",
    ],
)
def test_anything_else_is_refused(read, encoder_urls):
    with pytest.raises(ProtocolError):
        read(encoder_urls, SECRET)


@pytest.mark.parametrize(("read", "message"), SIDES)
def test_what_another_server_wrote_or_was_cut_is_refused(read, message):
    with pytest.raises(ProtocolError, match="not written by this server"):
        read(manifest.write(message, bytes(32)), SECRET)
    (whole,) = manifest.write(message, SECRET)
    assert read([whole], SECRET) == message
    for changed in (*(whole[:end] for end in range(len(whole))), whole + "AAAA"):
        with pytest.raises(ProtocolError):
            read([changed], SECRET)


def test_the_code_of_one_message_is_not_that_of_another():
    (theirs,) = manifest.write(EXPECT, SECRET)
    code = base64.b64decode(theirs)[:32]
    forged = code + encode_message(Expect("stolen", 3, 60.0))
    with pytest.raises(ProtocolError, match="not written by this server"):
        manifest.read_announced([base64.b64encode(forged).decode()], SECRET)


def test_a_user_cannot_make_a_scheduler_read_a_long_manifest():
    long = Expect("t" * MAX_HEADER_BYTES, 1, 60.0)
    with pytest.raises(ProtocolError):
        manifest.read_announced(manifest.write(long, SECRET), SECRET)


@given(st.lists(st.text(max_size=40), max_size=2))
def test_random_text_is_refused(encoder_urls):
    for read in READERS:
        with pytest.raises(ProtocolError):
            read(encoder_urls, SECRET)


@given(st.data(), st.sampled_from([EXPECT, SETTLED]))
def test_a_mutated_manifest_is_refused_or_as_it_was(data, message):
    (written,) = manifest.write(message, SECRET)
    place = data.draw(st.integers(0, len(written) - 1))
    mutated = written[:place] + data.draw(st.characters()) + written[place + 1 :]
    for read in READERS:
        with contextlib.suppress(ProtocolError):
            assert read([mutated], SECRET) == message


@pytest.mark.parametrize("custom", [None, "text", 5, ["a"], {"a": 1}, {"sglang_epd": "text"}])
def test_custom_parameters_of_any_kind_carry_a_manifest(custom):
    """Of a request for an embedding, in which SGLang lets a user write anything."""
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))
    assert not manifest.waits(request)
    written = manifest.write(EXPECT, SECRET)
    manifest.carry(request, written)
    assert manifest.waits(request)
    assert manifest.carried(request) == written


@pytest.mark.parametrize("urls", [{"a": 1}, 5, [5], [[]], "text", [{}]])
def test_urls_of_any_kind_are_no_manifest(urls):
    for read in READERS:
        with pytest.raises(ProtocolError):
            read(urls, SECRET)


def named(rid: str, worker: str | None) -> str:
    return manifest.name(SimpleNamespace(rid=rid, http_worker_ipc=worker))


texts = st.lists(st.sampled_from(["a", " of ", "%20", "\ud800"]), max_size=3).map("".join)


@given(texts, texts | st.none(), texts, texts | st.none())
def test_no_user_can_give_two_requests_one_name(rid, worker, other, its):
    """A scheduler would end at a request that it takes for another."""
    same = (rid, worker or None) == (other, its or None)
    assert (named(rid, worker) == named(other, its)) is same


def test_a_request_of_a_worker_is_no_other_one_of_that_text():
    assert named("a of W", None) != named("a", "W")
    assert named("a", "W") == named("a", "W")
    assert named("rid-7", None) == "rid-7"
