from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.language import manifest
from sglang_epd.wire import Cancel, Expect, encode_message

EXPECT = Expect("ticket", 3, 2, 60.0)


@given(
    st.builds(
        Expect,
        ticket=st.text(max_size=24),
        items=st.integers(1, 4096),
        consumers=st.integers(1, 999),
        ttl_s=st.floats(1e-3, 1e6),
    )
)
def test_a_manifest_is_read_as_it_was_written(expect):
    written = manifest.write(expect)
    assert all(isinstance(part, str) and part.isascii() for part in written)
    assert manifest.read(written) == expect


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
        [manifest.write(EXPECT)[0][:-8]],
        "a string",
    ],
)
def test_anything_else_is_refused(encoder_urls):
    with pytest.raises(ProtocolError):
        manifest.read(encoder_urls)


@given(st.lists(st.text(max_size=40), max_size=2))
def test_random_text_is_refused(encoder_urls):
    with pytest.raises(ProtocolError):
        manifest.read(encoder_urls)


@given(st.data())
def test_a_mutated_manifest_is_refused_or_read(data):
    written = list(manifest.write(EXPECT)[0])
    place = data.draw(st.integers(0, len(written) - 1))
    written[place] = data.draw(st.characters())
    with contextlib.suppress(ProtocolError):
        manifest.read(["".join(written)])
