"""Whether a video file may be shown to a demuxer.

FFmpeg opens whatever it recognises, playlists that name other files and hosts among it,
and builds its index of packets before anything can be asked of it: a file of a hundred
bytes may claim four billion. So files are admitted by what they are (ISO base media, that
is MP4 and QuickTime; Matroska, that is WebM), and what they claim is added up here first,
without reading a frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MediaLimits

# Packets a frame of video: sound comes in up to a hundred a second, in tracks for several
# languages, beside 24 frames or more.
_PACKETS_PER_FRAME = 20
# PCM sound in QuickTime counts its samples as packets of one size: seven minutes at 48 kHz.
_MAX_EQUAL_PACKETS = 20_000_000
_MAX_TRACKS = 64
# An edit may repeat a whole track.
_MAX_EDITS = 16
_MAX_ELEMENTS = 300_000

_ISO_FIRST = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_EBML = b"\x1a\x45\xdf\xa3"
# What FFmpeg would take a text for, and follow to other files and hosts. It looks no
# further than the first NUL.
_POINTERS = re.compile(rb"<mpd|<compositionplaylist|c=in ip|#extm3u|ffconcat", re.IGNORECASE)
# Boxes that hold or multiply claims. They are looked for wherever they stand, because
# FFmpeg reads them wherever they stand.
_CLAIMS = re.compile(rb"stsz|stz2|trun|elst|trak|cmov")


def check_container(data: bytes, limits: MediaLimits) -> None:
    """Look a video file over; no frame is read.

    Args:
        data: an MP4, QuickTime, WebM or Matroska file.
        limits: `max_bytes` and `max_video_frames` apply.

    Raises:
        MediaTooLargeError: more bytes, tracks or packets than a video within the limits has.
        MediaError: it is none of these files, or truncated or damaged.
    """
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(f"video has {len(data)} bytes, limit {limits.max_bytes}")
    if not data:
        raise MediaError("the video is empty")
    if _POINTERS.search(data, 0, data.find(b"\0") % (len(data) + 1)):
        raise MediaError("not a video: it names other files")
    if data[4:8] in _ISO_FIRST:
        _check_iso(data, limits)
    elif data.startswith(_EBML):
        _check_matroska(data, limits)
    else:
        raise MediaError("not a video that is read here: MP4, QuickTime, WebM and Matroska are")


def _check_iso(data: bytes, limits: MediaLimits) -> None:
    packets = equal = tracks = 0
    index = False
    for kind, start, end in _boxes(data):
        index |= kind == b"moov"
        if kind == b"mdat":
            continue
        for claim in _CLAIMS.finditer(data, start, end):
            if claim.group() == b"trak":
                tracks += 1
            elif claim.group() == b"stsz" and _number(data, claim.end() + 4):
                equal += _equal_packets(data, claim.end())
            else:
                packets += _listed_packets(data, claim, end)
        if tracks > _MAX_TRACKS:
            raise MediaTooLargeError(f"video has more than {_MAX_TRACKS} tracks")
        if packets > _packets(limits) or equal > _MAX_EQUAL_PACKETS:
            raise _too_many(limits)
    if not index:
        raise MediaError("the video is truncated: its index is missing")


def _equal_packets(data: bytes, at: int) -> int:
    """What an stsz box that gives one size for all claims."""
    size, count = _number(data, at + 4), _number(data, at + 8)
    if size * count > len(data):
        raise _overstated()
    return count


def _listed_packets(data: bytes, claim: re.Match[bytes], end: int) -> int:
    """What any other box claims; after its name come a version, flags and, mostly, a count."""
    at = claim.end()
    if claim.group() == b"cmov":
        raise MediaError("the video's index is compressed, which is not read here")
    if claim.group() == b"elst":
        if _number(data, at + 4) > _MAX_EDITS:
            raise MediaError(f"the video has more than {_MAX_EDITS} edits")
        return 0
    if claim.group() == b"trun":
        return _number(data, at + 4)
    count = _number(data, at + 8)
    if at + 12 + count // 2 > end:  # the shortest entries, in stz2, take half a byte
        raise _overstated()
    return count


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The outermost boxes: kind, where the content begins, where it ends."""
    position = 0
    for _ in range(_MAX_ELEMENTS):
        if position == len(data):
            return
        size, kind, body = _number(data, position), data[position + 4 : position + 8], 8
        if size == 1:
            size, body = int.from_bytes(data[position + 8 : position + 16]), 16
        elif size == 0:  # up to the end of the file
            size = len(data) - position
        if size < body:
            raise MediaError("the video is damaged")
        if position + size > len(data):
            raise MediaError("the video is truncated")
        yield kind, position + body, position + size
        position += size
    raise MediaError("the video is made of too many parts")


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4])


# Matroska elements: what may stand in a segment, and where frames are.
_SEGMENT, _CLUSTER, _GROUP = 0x18538067, 0x1F43B675, 0xA0
_SIMPLE_BLOCK, _BLOCK, _ENTRY = 0xA3, 0xA1, 0xAE
_TRACKS = 0x1654AE6B
_IN_SEGMENT = {
    0x114D9B74,  # seek head
    0x1549A966,  # info
    _TRACKS,
    _CLUSTER,
    0x1C53BB6B,  # cues
    0x1941A469,  # attachments
    0x1043A770,  # chapters
    0x1254C367,  # tags
}
_OPENED = {_SEGMENT, _CLUSTER, _GROUP, _TRACKS}
_LACED = 0x06


def _check_matroska(data: bytes, limits: MediaLimits) -> None:
    packets = tracks = 0
    position = 0
    for _ in range(_MAX_ELEMENTS):
        if position == len(data):
            return
        element, position = _element_id(data, position)
        size, position = _element_size(data, position)
        if element in _OPENED:
            # What is inside comes next, one level or another: its end needs no watching,
            # because nothing in it may reach beyond the file.
            if size is not None and position + size > len(data):
                raise MediaError("the video is truncated")
            continue
        if size is None:
            raise MediaError("the video is damaged")
        if position + size > len(data):
            raise MediaError("the video is truncated")
        if element in (_SIMPLE_BLOCK, _BLOCK):
            packets += _frames_in_block(data, position)
            if packets > _packets(limits):
                raise _too_many(limits)
        tracks += element == _ENTRY
        if tracks > _MAX_TRACKS:
            raise MediaTooLargeError(f"video has more than {_MAX_TRACKS} tracks")
        position += size
    raise MediaError("the video is made of too many parts")


def _frames_in_block(data: bytes, position: int) -> int:
    _, position = _element_size(data, position)  # the track's number, spelt alike
    head = data[position + 2 : position + 4]  # after the time: flags, and how many are laced
    if head and head[0] & _LACED:
        return head[-1] + 1
    return 1


def _element_id(data: bytes, position: int) -> tuple[int, int]:
    width = _width(data, position)
    if width > 4:
        raise MediaError("the video is damaged")
    return int.from_bytes(data[position : position + width]), position + width


def _element_size(data: bytes, position: int) -> tuple[int | None, int]:
    """A size, None if it says that it is not known, and where what follows begins."""
    width = _width(data, position)
    mask = (1 << 7 * width) - 1
    size = int.from_bytes(data[position : position + width]) & mask
    return (None if size == mask else size), position + width


def _width(data: bytes, position: int) -> int:
    if position >= len(data):
        raise MediaError("the video is truncated")
    width = 9 - data[position].bit_length()
    if width > 8:
        raise MediaError("the video is damaged")
    if position + width > len(data):
        raise MediaError("the video is truncated")
    return width


def _packets(limits: MediaLimits) -> int:
    return limits.max_video_frames * _PACKETS_PER_FRAME


def _overstated() -> MediaError:
    return MediaError("the video is truncated, or claims more than it holds")


def _too_many(limits: MediaLimits) -> MediaTooLargeError:
    return MediaTooLargeError(
        f"video has more packets than one of {limits.max_video_frames} frames, the limit, has"
    )
