"""Whether a video or sound file may be shown to FFmpeg, and the limits of a video.

FFmpeg opens every format that it recognises, playlists that name other files and hosts among it.
So files are admitted by their format: videos as ISO base media, that is MP4 and QuickTime,
or Matroska, that is WebM; sounds as WAV, FLAC, MP3 or Ogg. The process that opens and decodes
them bounds memory and time (`decoding`).
"""

from __future__ import annotations

import re

import msgspec

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MediaLimits

_ISO_FIRST = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML = b"\x1a\x45\xdf\xa3"
# Texts that FFmpeg would take for a playlist, and follow to other files and hosts. It looks no
# further than the first NUL.
_POINTERS = re.compile(rb"<mpd|<compositionplaylist|c=in ip|#extm3u|ffconcat", re.IGNORECASE)
_SOUND = re.compile(rb"RIFF....WAVE|RF64....WAVE|fLaC|OggS|\xff[\xe2-\xef\xf2-\xff]", re.DOTALL)
_ZEROS = re.compile(rb"\0{0,65536}")
# From a picture every three hours to the fastest cameras.
_SLOWEST, _FASTEST = 1e-4, 1e5


def check_container(data: bytes, limits: MediaLimits) -> None:
    """Look a video file over.

    Args:
        data: an MP4, QuickTime, WebM or Matroska file.
        limits: `max_bytes` applies.

    Raises:
        MediaTooLargeError: it has more bytes than allowed.
        MediaError: it is none of these files.
    """
    _check_bytes("video", data, limits)
    if _POINTERS.search(data, 0, data.find(b"\0") % (len(data) + 1)):
        raise MediaError("not a video: it names other files")
    if data[4:8] not in _ISO_FIRST and not data.startswith(_EBML):
        raise MediaError("not a video that is read here: MP4, QuickTime, WebM and Matroska are")


def check_audio(data: bytes, limits: MediaLimits) -> None:
    """Look an audio file over.

    Args:
        data: a WAV, FLAC, MP3 or Ogg file.
        limits: `max_bytes` applies.

    Raises:
        MediaTooLargeError: it has more bytes than allowed.
        MediaError: it is none of these files.
    """
    _check_bytes("audio", data, limits)
    # FFmpeg skips tags in front, and takes the rest for any format that it resembles.
    if not _SOUND.match(data, _after_tags(data)):
        raise MediaError("not an audio file that is read here: WAV, FLAC, MP3 and Ogg are")


def _check_bytes(kind: str, data: bytes, limits: MediaLimits) -> None:
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(f"{kind} has {len(data)} bytes, limit {limits.max_bytes}")
    if not data:
        raise MediaError(f"the {kind} is empty")


def _after_tags(data: bytes) -> int:
    """Where ID3 tags end (a size is 28 bits, seven a byte), and zeros behind the last one."""
    at = 0
    while data.startswith(b"ID3", at) and len(data) >= at + 10:
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        has_footer = data[at + 5] & 0x10
        at += 10 + size + (10 if has_footer else 0)
    zeros = _ZEROS.match(data, at) if at else None
    return zeros.end() if zeros else at


class VideoFacts(msgspec.Struct, frozen=True, tag="opened"):
    """A video stream.

    Attributes:
        frames: how many there are in the file.
        width, height: of a frame, in pixels.
        frames_per_second: on average; NaN where the file does not say.
        sound: whether the file has a track of it beside the pictures.
    """

    frames: int
    width: int
    height: int
    frames_per_second: float
    sound: bool = False


def check_video(facts: VideoFacts, limits: MediaLimits) -> None:
    """Compare a video with the limits.

    Raises:
        MediaTooLargeError: too many frames, or frames too large.
        MediaError: it has no frame, or no frame rate that can be.
    """
    if facts.frames < 1 or facts.width < 1 or facts.height < 1:
        raise MediaError("the video has no frames")
    if facts.frames > limits.max_video_frames:
        raise MediaTooLargeError(
            f"video has {facts.frames} frames, limit {limits.max_video_frames}"
        )
    if facts.width * facts.height > limits.max_video_pixels:
        raise MediaTooLargeError(
            f"video is {facts.width} x {facts.height} px, "
            f"limit {limits.max_video_pixels} px a frame"
        )
    rate = facts.frames_per_second
    if not _SLOWEST <= rate <= _FASTEST:  # written so that NaN fails too
        raise MediaError("the video's frame rate cannot be right")


def check_frames_read(facts: VideoFacts, count: int, limits: MediaLimits) -> None:
    """Whether `count` of a video's frames may be held in memory at full size.

    Raises:
        MediaTooLargeError: they are too many pixels together.
    """
    pixels = facts.width * facts.height * count
    if pixels > limits.max_video_total_pixels:
        raise MediaTooLargeError(
            f"{count} frames of {facts.width} x {facts.height} px = {pixels / 1e6:.6g} megapixels "
            f"would be read, limit {limits.max_video_total_pixels / 1e6:.6g}"
        )
