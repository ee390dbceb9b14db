from __future__ import annotations

import io
import struct
import time

import numpy as np
import pytest
import soundfile

import clips
from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits, check_audio

LIMITS = MediaLimits(max_audio_s=3.0)


def wav_header(rate: int = 16_000, channels: int = 1, data_bytes: int = 0) -> bytes:
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    return b"".join(
        [
            struct.pack("<4sI4s", b"RIFF", 36 + data_bytes, b"WAVE"),
            struct.pack("<4sI", b"fmt ", 16) + form,
            struct.pack("<4sI", b"data", data_bytes),
        ]
    )


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate_hz", [16_000, 44_100])
def test_what_is_read_here(container: str, rate_hz: int) -> None:
    check_audio(clips.audio(container=container, rate_hz=rate_hz, seconds=2.5), LIMITS)


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_long_clip_is_refused(container: str) -> None:
    with pytest.raises(MediaTooLargeError, match="longer than 3 s, the limit"):
        check_audio(clips.audio(container=container, seconds=4.0), LIMITS)


def test_an_hour_of_silence_is_not_decoded_to_its_end() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16_000 * 3600, np.int16), 16_000, format="FLAC")
    assert file.tell() < 1 << 20
    begin = time.process_time()
    with pytest.raises(MediaTooLargeError):
        check_audio(file.getvalue(), LIMITS)
    assert time.process_time() - begin < 1.0


def test_a_slow_rate_makes_a_long_clip() -> None:
    with pytest.raises(MediaTooLargeError):
        check_audio(wav_header(rate=1, data_bytes=200) + bytes(200), LIMITS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"This is a text.", "not an audio file"),
        (b"#EXTM3U\nfile:///etc/passwd", "not an audio file"),
        # FFmpeg skips the tag, and follows what comes after it.
        (b"ID3\4\0\0\0\0\0\0#EXTM3U\nfile:///etc/passwd", "not an audio file"),
        (b"ID3\4\0\0\x7f\x7f\x7f\x7f", "not an audio file"),
        (b"fLaC" + bytes(100), "damaged"),
        (b"OggS" + bytes(100), "damaged"),
        (wav_header(), "no sound"),
        (wav_header(channels=500, data_bytes=2000) + bytes(2000), "500 channels"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "not an audio file"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        check_audio(data, LIMITS)
    assert "passwd" not in str(caught.value)


@pytest.mark.parametrize("container", ["FLAC", "OGG", "MP3", "WAV"])
@pytest.mark.parametrize("kept", [5, 30, 44])
def test_the_head_of_a_file_alone_is_refused(container: str, kept: int) -> None:
    with pytest.raises(MediaError):
        check_audio(clips.audio(container=container)[:kept], LIMITS)


def test_bytes_are_limited() -> None:
    with pytest.raises(MediaTooLargeError, match="bytes, limit 10"):
        check_audio(clips.audio(), MediaLimits(max_bytes=10))
