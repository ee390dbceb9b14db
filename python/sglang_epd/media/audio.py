"""How long an audio clip is, found by decoding no more of it than is allowed.

What a header claims is worth little: a megabyte of FLAC may hold hours of silence, and
say nothing. libsndfile opens nothing but what it is given, unlike FFmpeg, which SGLang
decodes with afterwards.
"""

from __future__ import annotations

import io
import re

import numpy as np
import soundfile

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MediaLimits

_READ_HERE = "WAV, FLAC, MP3 and Ogg are"
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_MAX_CHANNELS = 16
_MAX_RATE_HZ = 768_000
_BLOCK_SAMPLES = 1 << 16
_MAGIC = re.compile(rb"RIFF....WAVE|RF64....WAVE|fLaC|OggS|\xff[\xe2-\xef\xf2-\xff]", re.DOTALL)


def check_audio(data: bytes, limits: MediaLimits) -> None:
    """Look an audio clip over, decoding it in small blocks that are not kept.

    Takes some milliseconds a minute of sound.

    Args:
        data: a WAV, FLAC, MP3 or Ogg file.
        limits: `max_bytes` and `max_audio_s` apply.

    Raises:
        MediaTooLargeError: it has more bytes, or lasts longer, than allowed.
        MediaError: it is not such a file, or damaged.
    """
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(f"audio has {len(data)} bytes, limit {limits.max_bytes}")
    if not data:
        raise MediaError("the audio is empty")
    # FFmpeg skips a tag in front, and takes what follows for whatever it looks like.
    if not _MAGIC.match(data, _after_tag(data)):
        raise MediaError(f"not an audio file that is read here: {_READ_HERE}")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _measure(file, limits)
    except soundfile.SoundFileError as error:
        raise MediaError("the audio is damaged or truncated") from error


def _measure(file: soundfile.SoundFile, limits: MediaLimits) -> None:
    if file.format not in _FORMATS:
        raise MediaError(f"not an audio file that is read here: {_READ_HERE}")
    if not 0 < file.channels <= _MAX_CHANNELS or not 0 < file.samplerate <= _MAX_RATE_HZ:
        raise MediaError(f"audio of {file.channels} channels at {file.samplerate} Hz")
    allowed = int(limits.max_audio_s * file.samplerate)
    block = np.empty((max(1, _BLOCK_SAMPLES // file.channels), file.channels), np.float32)
    samples = 0
    while read := len(file.read(out=block, dtype="float32", always_2d=True)):
        samples += read
        if samples > allowed:
            raise MediaTooLargeError(f"audio lasts longer than {limits.max_audio_s:g} s, the limit")
    if not samples:
        raise MediaError("the audio holds no sound")


def _after_tag(data: bytes) -> int:
    """Where an ID3 tag (its size is 28 bits, seven a byte), if there is one, ends."""
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size
