from __future__ import annotations

import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clips
from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits, check_container

LIMITS = MediaLimits(max_video_frames=100)
PACKETS = 100 * 20


@pytest.fixture(scope="module")
def mp4() -> bytes:
    return clips.video(frames=8)


@pytest.fixture(scope="module")
def webm() -> bytes:
    return clips.video(frames=8, container="webm")


def box(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def claims(kind: bytes, *numbers: int) -> bytes:
    """A file whose one claim is this box: version and flags, then numbers."""
    inner = box(kind, struct.pack(f">{1 + len(numbers)}I", 0, *numbers))
    return (
        box(b"ftyp", b"isom\0\0\2\0") + box(b"moov", box(b"trak", inner)) + box(b"mdat", bytes(99))
    )


def element(ident: int, content: bytes = b"", size: bytes | None = None) -> bytes:
    width = (ident.bit_length() + 7) // 8
    known = struct.pack(">Q", 1 << 56 | len(content))
    return ident.to_bytes(width) + (known if size is None else size) + content


UNKNOWN = b"\x01" + b"\xff" * 7
HEAD = element(0x1A45DFA3, element(0x4282, b"webm"))


def matroska(*clusters: bytes) -> bytes:
    return HEAD + element(0x18538067, b"".join(element(0x1F43B675, c) for c in clusters))


def block(laced: int = 0) -> bytes:
    """A block of no bytes, or of so many frames of none."""
    flags = bytes([0x04, laced - 1]) if laced else b"\0"
    return element(0xA3, b"\x81\0\0" + flags)


def test_real_videos_pass(mp4: bytes, webm: bytes) -> None:
    check_container(mp4, LIMITS)
    check_container(webm, LIMITS)


@pytest.mark.parametrize("container", ["mp4", "mov", "mkv", "webm"])
def test_what_cameras_and_browsers_write_passes(container: str) -> None:
    check_container(clips.video(frames=4, container=container), LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"This is a text.", "not a video"),
        (b"<html></html>", "not a video"),
        (b"RIFF\x24\0\0\0AVI LIST", "not a video that is read here"),
        (b"\0" * 100, "not a video"),
        # Playlists that FFmpeg would follow.
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "names other files"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "names other files"),
        (b"\x1a\x45\xdf\xa3\x9f<MPD dash:profile:isoff-on-demand:2011", "names other files"),
        (b"v=0\r\nc=IN IP4 10.0.0.1\r\n", "names other files"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        check_container(data, LIMITS)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize("kept", [9, 40, 0.1, 0.5, 0.9, -1])
@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_a_truncated_video_is_refused(mp4: bytes, webm: bytes, container: str, kept: float) -> None:
    data = mp4 if container == "mp4" else webm
    size = int(kept * len(data)) if 0 < kept < 1 else int(kept)
    with pytest.raises(MediaError, match=r"truncated|damaged"):
        check_container(data[:size], LIMITS)


def test_bytes_are_limited(mp4: bytes) -> None:
    with pytest.raises(MediaTooLargeError, match=f"{len(mp4)} bytes, limit 10"):
        check_container(mp4, MediaLimits(max_bytes=10))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (claims(b"stsz", 1, 0xFFFFFFFF), "claims more than it holds"),
        (claims(b"stsz", 0, 0xFFFFFFFF), "claims more than it holds"),
        (claims(b"stz2", 4, 0xFFFFFFFF), "claims more than it holds"),
        (claims(b"trun", 0xFFFFFFFF), "more packets"),
        (claims(b"trun", PACKETS + 1), "more packets"),
        (claims(b"elst", 1_000_000), "edits"),
        (claims(b"cmov"), "compressed"),
        (box(b"ftyp", b"isom") + box(b"moov", box(b"trak") * 65), "tracks"),
        (box(b"ftyp", b"isom") + box(b"free") * 300_001, "too many parts"),
        (box(b"ftyp", b"isom") + struct.pack(">I4s", 4, b"moov"), "damaged"),
        (box(b"ftyp", b"isom") + struct.pack(">I4sQ", 1, b"moov", 1 << 62), "truncated"),
        (matroska(block() * (PACKETS + 1)), "more packets"),
        (matroska(*[block(256)] * 8), "more packets"),
        (matroska(element(0xA0, element(0xA1, b"\x81\0\0\x02\xff") * 8)), "more packets"),
        (matroska(element(0xEC) * 300_001), "too many parts"),
        (HEAD + element(0x18538067, element(0x1654AE6B, element(0xAE) * 65)), "tracks"),
        (HEAD + element(0x18538067, b"\0\0"), "damaged"),
    ],
)
def test_claims_are_added_up(data: bytes, reason: str) -> None:
    begin = time.process_time()
    with pytest.raises(MediaError, match=reason):
        check_container(data, LIMITS)
    assert time.process_time() - begin < 3.0


def test_claims_are_found_where_they_do_not_belong() -> None:
    """FFmpeg takes an index inside `udta`, or inside `free`, for one."""
    hidden = box(b"trun", struct.pack(">2I", 0, PACKETS + 1))
    for wrapper in (b"udta", b"free", b"meta"):
        with pytest.raises(MediaTooLargeError, match="more packets"):
            check_container(box(b"ftyp", b"isom") + box(wrapper, hidden), LIMITS)


def test_frames_that_spell_a_claim_are_no_claim() -> None:
    frames = box(b"mdat", b"trun" + bytes(4) + b"\xff" * 4)
    check_container(box(b"ftyp", b"isom") + box(b"moov") + frames, LIMITS)


def test_streams_of_unknown_size_pass() -> None:
    """As a browser's recorder writes them."""
    live = HEAD + element(0x18538067, size=UNKNOWN)
    live += element(0x1F43B675, element(0xE7, b"\0") + block() * 5, size=UNKNOWN) * 3
    check_container(live, LIMITS)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_ends_in_our_own_error(data: st.DataObject) -> None:
    start = bytearray(
        data.draw(
            st.sampled_from(
                [claims(b"stsz", 0, 1, 8), claims(b"trun", 1), matroska(block(2) * 3, block())]
            )
        )
    )
    for _ in range(data.draw(st.integers(1, 6))):
        start[data.draw(st.integers(0, len(start) - 1))] = data.draw(st.integers(0, 255))
    try:
        check_container(bytes(start), LIMITS)
    except MediaError as error:
        assert len(str(error)) < 200
