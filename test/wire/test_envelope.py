from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.envelope import MAJOR, MINOR, open_envelope, seal


@given(st.binary(max_size=64))
def test_what_was_sealed_opens(body):
    assert bytes(open_envelope(seal(body), max_bytes=1000)) == body


@given(st.binary(max_size=64))
def test_anything_else_is_refused(frame):
    if frame[:4] == b"EPD" + bytes([MAJOR]) and len(frame) > 4:
        return
    with pytest.raises(ProtocolError):
        open_envelope(frame, max_bytes=1000)


def test_the_limit_counts_the_whole_frame():
    frame = seal(b"12345")
    open_envelope(frame, max_bytes=len(frame))
    with pytest.raises(ProtocolError, match=f"{len(frame)} bytes, limit {len(frame) - 1}"):
        open_envelope(frame, max_bytes=len(frame) - 1)


@pytest.mark.parametrize("major", [MAJOR - 1, MAJOR + 1, 255])
def test_another_major_version_is_refused_with_both_versions(major):
    frame = b"EPD" + bytes([major, 0]) + b"body"
    with pytest.raises(ProtocolError, match=f"version {major}, this server {MAJOR}"):
        open_envelope(frame, max_bytes=1000)


def test_a_newer_minor_version_is_not():
    frame = b"EPD" + bytes([MAJOR, MINOR + 1]) + b"body"
    assert bytes(open_envelope(frame, max_bytes=1000)) == b"body"
