"""Encoded bytes to pixels, the same pixels that SGLang's PIL path makes of them.

SGLang opens, loads and, unless the mode is RGB already, converts to RGB: the alpha
channel is dropped, not blended, and an EXIF orientation is not applied (TIFF is the
exception: Pillow itself applies it while loading). `decode_image` does exactly that,
behind bounds that are checked before any pixel is decoded.
"""

from __future__ import annotations

import io
import re

from PIL import Image, ImageFile

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MediaLimits

# Formats whose decoders are C libraries. Left out are those that run another program
# (EPS runs Ghostscript), decode in Python (PPM, QOI, FITS: minutes of a held GIL for
# one hostile file), or hide a second picture behind the header's size (ICO, ICNS).
# HEIF is there when the pillow-heif package registers it.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF")
# Pillow parses headers in Python, a few reads for each part of a file, and parts may
# take four bytes: a megabyte of them costs a second, and more than linearly where it
# glues their texts together. Real headers take tens of reads.
_MAX_HEADER_READS = 10_000
_BYTES_PER_READ = 256  # after the header: PNG encoders cut their data every 8 KiB
_MAX_EXIF_PARTS = 100
# A progressive JPEG passes over all its pixels once a scan: 108 bytes in a file of 81
# megapixels bought 25 ms. Encoders write about ten scans.
_MAX_JPEG_SCANS = 100
# In a scan's data 0xFF is followed by 0x00, 0x01 or a restart marker; all else ends it.
_JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")


class _TooManyReadsError(Exception):
    pass


class _CountedFile(io.BytesIO):
    """An image file that may be read only so many times."""

    reads_left = _MAX_HEADER_READS

    def read(self, size: int | None = -1) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise _TooManyReadsError
        return super().read(size)


# Registers the formats. Doing it here keeps worker threads from racing to do it.
Image.init()


def decode_image(data: bytes, limits: MediaLimits) -> Image.Image:
    """Decode an image, of an animation the first frame.

    Safe to call from several threads at once, and meant for worker threads: a large
    picture takes a second.

    Args:
        data: an image file's bytes: PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000.
        limits: `max_pixels` and `max_bytes` apply.

    Returns:
        A loaded image of mode RGB.

    Raises:
        MediaTooLargeError: it has more bytes or pixels than allowed; no pixel was decoded.
        MediaError: it is not an image, truncated or damaged.
    """
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(f"image has {len(data)} bytes, limit {limits.max_bytes}")
    file = _CountedFile(data)
    image, name = _open(file, data)
    with image:
        _check_size(image, limits)
        if any(tile[0] in Image.DECODERS for tile in image.tile):  # decoders in Python
            raise MediaError(f"{name} image uses a compression that is not read here")
        if name == "JPEG" and _jpeg_scans(data) > _MAX_JPEG_SCANS:
            raise MediaError(f"JPEG image has more than {_MAX_JPEG_SCANS} scans")
        file.reads_left = _MAX_HEADER_READS + len(data) // _BYTES_PER_READ
        try:
            image.load()
            _check_size(image, limits)
            # Pillow would carry the transparent colour over, and warn where it cannot.
            # The pixels do not depend on it.
            image.info.pop("transparency", None)
            # A copy where the mode is RGB already: unlike the file's own image it does
            # not keep the encoded bytes and the decoder alive.
            return image.convert("RGB")
        except MediaError:
            raise
        except Exception as error:
            raise _damaged(name, error) from error


def _open(file: _CountedFile, data: bytes) -> tuple[ImageFile.ImageFile, str]:
    """Read an image's header.

    This is the loop of `Image.open` without its check against decompression bombs:
    that one compares with a global, warns through a global, and says neither width
    nor height. `_check_size` takes its place.
    """
    prefix = data[:16]
    for name in _FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        verdict = accept(prefix) if accept else False
        # A string says that Pillow was built without this format.
        if factory is None or not verdict or isinstance(verdict, str):
            continue
        if data.count(b"Exif\0\0") > _MAX_EXIF_PARTS:
            raise _damaged(name, _TooManyReadsError())
        try:
            return factory(file, ""), name
        except Exception as error:  # on hostile bytes nearly any type, MemoryError included
            raise _damaged(name, error) from error
    raise MediaError(f"not an image: {_guess(data)}")


def _check_size(image: Image.Image, limits: MediaLimits) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise MediaError(f"image is empty: {width} x {height} px")
    if width * height > limits.max_pixels:
        raise MediaTooLargeError(
            f"image is {width} x {height} px = {width * height / 1e6:.6g} megapixels, "
            f"limit {limits.max_pixels / 1e6:.6g}"
        )


def _jpeg_scans(data: bytes) -> int:
    """Count the scans up to the end of the first image, or one more than is allowed."""
    scans, position = 0, 2
    while scans <= _MAX_JPEG_SCANS:
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or marker.group() == b"\xff\xd9":
            break
        scans += marker.group() == b"\xff\xda"
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    return scans


def _damaged(name: str, error: Exception) -> MediaError:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return MediaTooLargeError(f"{name} image has a frame of too many pixels")
    if isinstance(error, MemoryError):
        return MediaTooLargeError(f"{name} image takes more memory than there is")
    if isinstance(error, _TooManyReadsError):
        return MediaError(f"{name} image is made of too many parts")
    reason = str(error).lower()
    # Only the kind of failure is passed on: Pillow's texts may quote the file's bytes.
    if isinstance(error, EOFError) or "truncat" in reason or "not enough" in reason:
        return MediaError(f"{name} image is truncated")
    return MediaError(f"{name} image is damaged or truncated ({type(error).__name__})")


def _guess(data: bytes) -> str:
    """What the bytes seem to be instead: most often a web page or an error in JSON."""
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for pattern, guess in _GUESSES:
        if pattern.match(start):
            return guess
    return "its format is none of PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000"


_GUESSES = tuple(
    (re.compile(pattern, re.DOTALL), guess)
    for pattern, guess in (
        (rb"\Z", "it is empty"),
        (rb"<!doctype html|<html", "it is an HTML page"),
        (rb"<svg|<\?xml.*<svg", "SVG drawings are not read here"),
        (rb"%pdf", "it is a PDF document"),
        (rb"....ftyp(heic|heix|mif1|msf1)", "HEIF is not read here"),
        (rb"....ftyp|\x1a\x45\xdf\xa3|riff....avi ", "it is a video"),
        (rb"[\t\n\r -~]*\Z", "it is text"),
    )
)
