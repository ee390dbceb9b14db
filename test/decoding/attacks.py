"""Small files that ask for much memory or time."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache

from PIL import Image

import clips


def box(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def tiff_tile(side: int) -> bytes:
    """16 x 16 grey pixels, in one tile of `side` squared."""
    tile = zlib.compress(bytes(side * side))
    tags = [
        (256, 4, 16),
        (257, 4, 16),
        (258, 3, 8),
        (259, 3, 8),  # deflate
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, side),
        (323, 4, side),
        (324, 4, 8 + 2 + 10 * 12 + 4),
        (325, 4, len(tile)),
    ]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + tile


def picture(mode: str, kind: str, width: int, height: int, **options: object) -> bytes:
    """One colour, which compresses to next to nothing."""
    file = io.BytesIO()
    image = Image.new(mode, (width, height), 90)
    if options.pop("animated", False):
        options |= {"save_all": True, "append_images": [Image.new(mode, (width, height), 91)]}
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has no pixels to show for it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        numbers(len(data)) + kind + data + numbers(zlib.crc32(kind + data)) for kind, data in chunks
    )


def scans(side: int, count: int) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    data = picture("L", "JPEG", side, side, progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + b"\xff\xd9"


def jpeg_2000(side: int) -> bytes:
    """RGBA, of a few hundred bytes: of one grey no size of it has anything to write."""
    data = bytearray(picture("RGBA", "JPEG2000", 64, 64))
    extent = numbers(side, side)
    at = data.index(b"\xff\x51") + 6
    for place in (data.index(b"ihdr") + 4, at, at + 16):  # the last of a tile
        data[place : place + 8] = extent
    return bytes(data)


def filled() -> bytes:
    """A JPEG with filling between its parts, which Pillow reads in Python, byte by byte."""
    start = picture("L", "JPEG", 16, 16)
    return start[:2] + b"\xff" * (48 << 20) + start[2:]


def trailing(count: int) -> bytes:
    """A PNG with so many empty parts behind its pixels, which Pillow reads one by one and, as
    they are called like public ones, does not keep."""
    data = picture("L", "PNG", 448, 448)
    part = bytes(4) + b"aAAa" + zlib.crc32(b"aAAa").to_bytes(4)
    return data[:-12] + part * count + data[-12:]


def samples_claimed(count: int, hidden: bytes = b"", kind: bytes = b"stsz") -> bytes:
    """An MP4 file whose index claims `count` packets of a byte, or of four bits in `stz2`.

    Args:
        hidden: the end of the size of the box that claims it: with the first letters of the
            box's name behind it, it spells another name.
    """
    data = clips.video(frames=4)
    content = numbers(0, 1 if kind == b"stsz" else 4, count)
    return grow(data, b"stsz", _padded(kind, content, hidden))


def _padded(kind: bytes, content: bytes, hidden: bytes) -> bytes:
    return box(kind, content.ljust(int.from_bytes(hidden) - 8, b"\0") if hidden else content)


def packets_of_a_byte(count: int) -> bytes:
    """An MP4 file each byte of which is a packet, all in one chunk."""
    data = clips.video(frames=4)
    data = grow(data, b"stsz", box(b"stsz", numbers(0, 1, count)))
    data = grow(data, b"stsc", box(b"stsc", numbers(0, 1, 1, count, 1)))
    return data.ljust(len(data) + count, b"\0")


def fragments_claimed(count: int, hidden: bytes = b"") -> bytes:
    """An MP4 file with a fragment that claims `count` packets; `hidden` as above."""
    data = clips.video(frames=4)
    track = int.from_bytes(data[data.index(b"tkhd") + 16 :][:4])
    extends = box(b"mvex", box(b"trex", numbers(0, track, 1, 0, 1, 0)))
    data = grow(data, b"udta", extends) if b"udta" in data else data
    run = box(b"tfhd", numbers(0, track)) + _padded(b"trun", numbers(0, count), hidden)
    run = box(b"traf", run)
    return data + box(b"moof", box(b"mfhd", numbers(0, 1)) + run)


def packed_packets(count: int, nbytes: int = 9 << 20) -> bytes:
    """A Matroska file of so many packets, each of them zeros that zlib has made small."""

    def element(name: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        head = name.to_bytes((name.bit_length() + 7) // 8)
        return head + (1 << 56 | len(content)).to_bytes(8) + content

    compression = element(0x5034, element(0x4254, b"\0"))
    encoding = element(0x6240, element(0x5031, b"\0"), element(0x5032, b"\1"), compression)
    picture = element(0xE0, element(0xB0, b"\0\x40"), element(0xBA, b"\0\x30"))
    head = [(0xD7, b"\1"), (0x73C5, b"\1"), (0x83, b"\1"), (0x86, b"V_MJPEG")]
    track = element(0xAE, *(element(*one) for one in head), picture, element(0x6D80, encoding))
    packet = zlib.compress(bytes(nbytes))
    blocks = (element(0xA3, b"\x81", at.to_bytes(2), b"\x80", packet) for at in range(count))
    cluster = element(0x1F43B675, element(0xE7, b"\0"), *blocks)
    times = element(0x1549A966, element(0x2AD7B1, numbers(100_000_000)))
    kind = element(0x1A45DFA3, element(0x4282, b"matroska"))
    return kind + element(0x18538067, times, element(0x1654AE6B, track), cluster)


def canvas(side: int) -> bytes:
    """A WebP animation whose frames are of a pixel, and its canvas of `side` squared."""
    data = bytearray(picture("RGB", "WEBP", 1, 1, animated=True, lossless=True))
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = (side - 1).to_bytes(3, "little") * 2
    return bytes(data)


def grow(data: bytes, kind: bytes, new: bytes) -> bytes:
    """Put a box in the place of the first of this kind, and mend the sizes around it."""
    around = [b"moov", b"trak", b"mdia", b"minf", b"stbl"]
    at = data.index(kind) - 4
    length = int.from_bytes(data[at : at + 4])
    out = bytearray(data[:at] + new + data[at + length :])
    for name in around:
        place = data.index(name) - 4
        size = int.from_bytes(data[place : place + 4])
        if place < at < place + size:
            out[place : place + 4] = (size + len(new) - length).to_bytes(4)
    return bytes(out)


def grows(side: int) -> bytes:
    """An H.264 video of 64 x 64 pixels whose last frame is `side` squared."""
    small, large = (clips.encode(clips.still(width, width, frames=4)) for width in (64, side))
    at = large.index(b"avcC") + 4 + 6
    sets = b""
    for _ in ("sequence", "picture"):
        size = int.from_bytes(large[at : at + 2])
        sets += numbers(size) + large[at + 2 : at + 2 + size]
        at += 3 + size  # after the first comes how many of the second there are
    sizes = small.index(b"stsz") + 16
    last = sizes + 4 * int.from_bytes(small[sizes - 4 : sizes]) - 4
    first = large.index(b"stsz") + 16
    start = int.from_bytes(large[large.index(b"stco") + 12 :][:4])
    frame = sets + large[start : start + int.from_bytes(large[first : first + 4])]
    total = sum(int.from_bytes(small[place : place + 4]) for place in range(sizes, last + 4, 4))
    begin = int.from_bytes(small[small.index(b"stco") + 12 :][:4])
    old = int.from_bytes(small[last : last + 4])
    end = begin + total
    out = bytearray(small[: end - old] + frame + small[end:])
    moved = last + len(frame) - old if last > end else last
    out[moved : moved + 4] = numbers(len(frame))
    media = small.index(b"mdat") - 4
    out[media : media + 4] = numbers(int.from_bytes(small[media : media + 4]) + len(frame) - old)
    return bytes(out)


# Pictures that take far more memory than their files have bytes; each takes a while to make.
BOMBS: dict[str, Callable[[], bytes]] = {
    "tiff tile": lambda: tiff_tile(16_000),
    "jpeg 2000": lambda: picture("RGB", "JPEG2000", 3000, 2500),
    "jpeg 2000 with alpha": lambda: picture("RGBA", "JPEG2000", 3000, 2500),
    "webp animation": lambda: picture("RGB", "WEBP", 3000, 2500, animated=True, method=0),
    "png": lambda: picture("L", "PNG", 9000, 9000),
}


@cache
def bomb(name: str) -> bytes:
    return BOMBS[name]()
