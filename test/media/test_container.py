from __future__ import annotations

import pytest
from msgspec.structs import replace

import clips
from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import (
    MediaLimits,
    VideoFacts,
    check_audio,
    check_container,
    check_frames_read,
    check_video,
)

LIMITS = MediaLimits()


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


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_sounds_that_are_read_here_pass(container: str) -> None:
    check_audio(clips.audio(container=container), LIMITS)


@pytest.mark.parametrize(
    "tags",
    [
        b"ID3\4\0\0\0\0\0\3abc",
        b"ID3\4\0\0\0\0\0\0" * 3,
        b"ID3\4\0\x10\0\0\0\0" + b"3DI\4\0\x10\0\0\0\0",
        b"ID3\4\0\0\0\0\0\0" + bytes(2000),
    ],
    ids=["one", "several", "with a footer", "and padding"],
)
def test_tags_before_a_sound_are_skipped_as_ffmpeg_skips_them(tags: bytes) -> None:
    data = clips.audio(container="MP3")
    assert not data.startswith(b"ID3")
    check_audio(tags + data, LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"This is a text.", "not an audio file"),
        (b"#EXTM3U\nfile:///etc/passwd", "not an audio file"),
        # FFmpeg skips the tag, and follows what comes after it.
        (b"ID3\4\0\0\0\0\0\0#EXTM3U\nfile:///etc/passwd", "not an audio file"),
        (b"ID3\4\0\0\x7f\x7f\x7f\x7f", "not an audio file"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "not an audio file"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        check_audio(data, LIMITS)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize("check", [check_container, check_audio])
def test_bytes_are_limited(check) -> None:
    with pytest.raises(MediaTooLargeError, match="99 bytes, limit 10"):
        check(bytes(99), MediaLimits(max_bytes=10))


SMALL = MediaLimits(max_video_frames=100, max_video_pixels=1000, max_video_total_pixels=5000)
FACTS = VideoFacts(100, 40, 25, 30.0)


def test_what_is_within_the_limits_passes() -> None:
    check_video(FACTS, SMALL)
    check_frames_read(FACTS, 5, SMALL)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"frames": 101}, "101 frames, limit 100"),
        ({"width": 41}, "41 x 25 px, limit 1000 px a frame"),
    ],
)
def test_what_is_larger_is_told_by_figures(changes: dict, reason: str) -> None:
    with pytest.raises(MediaTooLargeError, match=reason):
        check_video(replace(FACTS, **changes), SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 0},
        {"width": 0},
        {"frames_per_second": 0.0},
        {"frames_per_second": float("nan")},
        {"frames_per_second": float("inf")},
        {"frames_per_second": 1e-12},  # a century for a clip
    ],
)
def test_what_cannot_be_is_refused(changes: dict) -> None:
    with pytest.raises(MediaError, match=r"no frames|frame rate"):
        check_video(replace(FACTS, **changes), SMALL)


def test_the_frames_that_are_read_have_a_limit_together() -> None:
    with pytest.raises(MediaTooLargeError, match="6 frames of 40 x 25 px"):
        check_frames_read(FACTS, 6, SMALL)
