"""Media that cost a server more than their bytes: what `hostile_attacks.py` sends.

Each is made from a small honest file whose header is then changed, so that making it costs
little. `fresh` gives a copy that no cache knows.
"""

from __future__ import annotations

import base64
import io
import secrets
import struct
import sys
import zlib
from pathlib import Path

from comparison.workloads import Clip
from comparison.workloads import video as clip_of
from pictures import bomb, jpeg, png_chunk, truncated  # which also finds scripts/
from PIL import Image

from photographs import load

# Where videos are made.
sys.path.append(str(Path(__file__).resolve().parents[1] / "test"))

MEGAPIXELS_100 = 10_000
# Three bytes a pixel stay just below the 2 GiB that libtiff takes for one tile.
TIFF_TILE = 26_720
CLAIMED_SAMPLES = 60_000_000
# The last byte of a box's size and its name: `el` and `stsz` read as `elst` too.
_SIZE_ENDING_IN_EL = 0x0000656C


def fresh(media: bytes) -> bytes:
    """With 16 bytes at the end that decoders pass over, other ones each time."""
    return media + struct.pack(">I4s", 16, b"free") + secrets.token_bytes(8)


def data_url(media: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(media).decode()}"


def escapes(count: int = 480_000) -> str:
    """A data URL that is nothing but percent escapes."""
    return "data:image/png," + "%00" * count


def zeros(count: int) -> bytes:
    """The zlib stream of so many zero bytes, a multiple of 16 MiB or not, without making them."""
    deflate = zlib.compressobj(9, wbits=-15)
    block = deflate.compress(bytes(1 << 24)) + deflate.flush(zlib.Z_FULL_FLUSH)
    whole, rest = divmod(count, 1 << 24)
    last = zlib.compressobj(9, wbits=-15)
    end = last.compress(bytes(rest)) + last.flush()
    adler = (count % 65_521) << 16 | 1
    return b"\x78\xda" + block * whole + end + struct.pack(">I", adler)


def tiff(tile: int = TIFF_TILE, side: int = 16) -> bytes:
    """A picture of 16 x 16 pixels in one tile of 26,720 x 26,720."""
    data = zeros(3 * tile * tile)
    short, long = 3, 4
    tags = [(256, short, side), (257, short, side), (259, short, 8), (262, short, 2)]
    tags += [(277, short, 3), (284, short, 1), (322, long, tile), (323, long, tile)]
    after = 8 + 2 + 12 * (len(tags) + 3) + 4
    tags += [(324, long, after + 6), (325, long, len(data))]
    entries = [struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags]
    entries.append(struct.pack("<HHII", 258, short, 3, after))
    entries.sort(key=lambda entry: struct.unpack_from("<H", entry))
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8) + directory + struct.pack("<3H", 8, 8, 8) + data


def jpeg2000(side: int = MEGAPIXELS_100) -> bytes:
    """RGBA, in one tile. Of one grey no size of it has any coefficients to write."""
    file = io.BytesIO()
    Image.new("RGBA", (64, 64), (128,) * 4).save(file, "JPEG2000")
    data = bytearray(file.getvalue())
    size = data.index(b"\xff\x51") + 6
    struct.pack_into(">II", data, data.index(b"ihdr") + 4, side, side)
    struct.pack_into(">II", data, size, side, side)
    struct.pack_into(">II", data, size + 16, side, side)  # of a tile
    return bytes(data)


def webp(side: int = MEGAPIXELS_100) -> bytes:
    """An animation whose frames are of a pixel, and its canvas of 100 megapixels."""
    file = io.BytesIO()
    frames = [Image.new("RGB", (1, 1), colour) for colour in ("red", "blue")]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], minimize_size=False)
    data = bytearray(file.getvalue())
    extent = struct.pack("<I", side - 1)[:3]
    at = data.index(b"VP8X") + 12
    data[at : at + 6] = extent * 2
    return bytes(data)


def webp_still(side: int = MEGAPIXELS_100) -> bytes:
    """A lossless picture of one colour, which is written alike at any size."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "WEBP", lossless=True)
    data = bytearray(file.getvalue())
    at = data.index(b"VP8L") + 9  # after the length and a signature of a byte
    struct.pack_into("<I", data, at, side - 1 | side - 1 << 14)
    return bytes(data)


def png_texts(count: int = 1000) -> bytes:
    """A small PNG with comments that are 64 MiB each once inflated."""
    file = io.BytesIO()
    load("coffee").resize((64, 64)).save(file, "PNG")
    small = file.getvalue()
    text = png_chunk(b"zTXt", b"Comment\0\0" + zeros(64 << 20))
    return small[:33] + text * (count * 8192 // len(text) or 1) + small[33:]


def video(samples: int = CLAIMED_SAMPLES) -> bytes:
    """An MP4 of some kilobytes whose table claims millions of samples, in a box that
    reads as another's name."""
    clip = clip_of(Clip(frames=8, rate=8.0, width=64, height=64), "hostile")
    sizes = struct.pack(">IIII", 0, 1, samples, 0)
    sizes = sizes.ljust(_SIZE_ENDING_IN_EL - 8, b"\0")
    chunks = struct.pack(">IIIII", 0, 1, 1, samples, 1)
    return _boxes(clip, {b"stsz": sizes, b"stsc": chunks})


def video_of_many_packets(packets: int = 1_000_000) -> bytes:
    """An MP4 of a megabyte, each byte of which is a packet: within all limits."""
    clip = clip_of(Clip(frames=8, rate=8.0, width=64, height=64), "hostile")
    frames = clip[clip.index(b"mdat") + 4 : clip.index(b"moov") - 4].ljust(packets, b"\0")
    sizes = struct.pack(">III", 0, 1, packets)
    chunks = struct.pack(">IIIII", 0, 1, 1, packets, 1)
    return _boxes(clip, {b"mdat": frames, b"stsz": sizes, b"stsc": chunks})


def _boxes(data: bytes, others: dict[bytes, bytes]) -> bytes:
    """The boxes of `data`, with other contents for those that `others` names."""
    made, at = [], 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        content = others.get(kind, data[at + 8 : at + size])
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
            content = _boxes(content, others)
        made.append(struct.pack(">I4s", 8 + len(content), kind) + content)
        at += size
    return b"".join(made)


def garbage() -> list[bytes]:
    """What is no picture, or half of one."""
    return [truncated(), b"not a picture", bomb(), secrets.token_bytes(100_000), bytes(1000)]


def pictures(count: int, side: int = 896) -> list[bytes]:
    return [jpeg((side, side), ("leaver", number)) for number in range(count)]
