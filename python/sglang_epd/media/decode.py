"""Encoded bytes to pixels, the same pixels that SGLang's PIL path makes of them.

SGLang opens, loads and, unless the mode is RGB already, converts to RGB: the alpha
channel is dropped, not blended, and an EXIF orientation is not applied (TIFF is the
exception: Pillow itself applies it while loading). Processors with `smart_rgb_conversion`
(GLM-4V's) have pictures turned and laid over a background. `open_image` and `read_image` do
that, behind bounds on a header's claims. The process that decodes bounds memory and time
beyond that (`decoding`).
"""

from __future__ import annotations

import io
import re
from typing import Any, BinaryIO

from PIL import Image, ImageFile, ImageOps

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MAX_JPEG_2000_PIXELS, MediaLimits

# Formats whose decoders are C libraries. Left out are those that run another program
# (EPS runs Ghostscript), decode in Python (PPM, QOI, FITS: minutes of a held GIL for
# one hostile file), or hide a second picture behind the header's size (ICO, ICNS).
# HEIF is there when the pillow-heif package registers it.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF")
# A JPEG of many scans passes over all its pixels once a scan: 108 bytes in a file of 81
# megapixels bought 25 ms. Encoders write about ten scans.
_MAX_JPEG_SCANS = 100
# In a scan's data 0xFF is followed by 0x00, 0x01 or a restart marker; all else ends it.
_JPEG_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")
# Half of what alpha and brightness are at most.
_OPAQUE = _BRIGHT = 128
# Registers the formats. Doing it here keeps worker threads from racing to do it.
Image.init()


def open_image(file: BinaryIO, limits: MediaLimits) -> tuple[ImageFile.ImageFile, str]:
    """Read an image's header: the image, of which nothing is decoded, and its format.

    This is the loop of `Image.open` without its check against decompression bombs:
    that one compares with a global, warns through a global, and says neither width
    nor height.

    Args:
        limits: `max_pixels` and `max_bytes` apply.

    Raises:
        MediaTooLargeError: it has more bytes or pixels than allowed.
        MediaError: it is not an image, or its header is truncated or damaged.
    """
    nbytes = file.seek(0, io.SEEK_END)
    if nbytes > limits.max_bytes:
        raise MediaTooLargeError(f"image has {nbytes} bytes, limit {limits.max_bytes}")
    file.seek(0)
    start = file.read(512)
    file.seek(0)
    for name in _FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        verdict = accept(start[:16]) if accept else False
        # A string says that Pillow was built without this format.
        if factory is None or not verdict or isinstance(verdict, str):
            continue
        try:
            image = factory(file, "")
        except Exception as error:  # on hostile bytes nearly any type, MemoryError included
            raise _damaged(name, error) from error
        check_size(image.size, name, limits)
        if any(tile[0] in Image.DECODERS for tile in image.tile):  # decoders in Python
            raise MediaError(f"{name} image uses a compression that is not read here")
        return image, name
    raise MediaError(f"not an image: {_guess(start)}")


def read_image(
    image: ImageFile.ImageFile, name: str, limits: MediaLimits, *, smart_rgb: bool = False
) -> Image.Image:
    """The pixels of an image that `open_image` has opened, of mode RGB; it is closed.

    Args:
        name: of the format, as `open_image` gives it.
        smart_rgb: turn it as its EXIF orientation says, and lay it over a background, as
            SGLang's `smart_to_rgb` does.

    Raises:
        MediaTooLargeError: it takes more memory than there is, or has grown.
        MediaError: it is truncated or damaged.
    """
    with image:
        try:
            if name == "JPEG" and _jpeg_scans(image) > _MAX_JPEG_SCANS:
                raise MediaError(f"JPEG image has more than {_MAX_JPEG_SCANS} scans")
            image.load()
            check_size(image.size, name, limits)
            if smart_rgb:
                return _turned_and_laid(image)
            # Pillow would carry the transparent colour over, and warn where it cannot.
            # The pixels do not depend on it.
            image.info.pop("transparency", None)
            # Where the mode is RGB already, a copy would cost as much as decoding.
            return image if image.mode == "RGB" else image.convert("RGB")
        except MediaError:
            raise
        except Exception as error:
            raise _damaged(name, error) from error


def _turned_and_laid(image: Image.Image) -> Image.Image:
    """An image as `utils.common.smart_to_rgb` makes it, with a copy less.

    The background is dark where the opaque pixels along the edges are bright, light where they
    are dark, and white where there are none.
    """
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode not in ("RGBA", "LA") and "transparency" not in image.info:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    width, height = image.size
    across, down = range(0, width, max(1, width // 20)), range(0, height, max(1, height // 20))
    edges = [(x, y) for x in across for y in (0, height - 1)]
    edges += [(x, y) for y in down for x in (0, width - 1)]
    seen: list[Any] = [image.getpixel(place) for place in edges]
    colours = [pixel[:3] for pixel in seen if pixel[3] > _OPAQUE]
    shade = 255
    if colours:
        bright = sum(map(sum, colours)) / (3 * len(colours)) > _BRIGHT
        shade = 32 if bright else 240
    background = Image.new("RGB", image.size, (shade,) * 3)
    background.paste(image, mask=image)
    return background


def check_size(size: tuple[int, int], name: str, limits: MediaLimits) -> None:
    """Compare width and height of an image of a format with the limits.

    Args:
        name: of the format.

    Raises:
        MediaTooLargeError: it has more pixels than allowed.
        MediaError: it has none.
    """
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"image is empty: {width} x {height} px")
    most, whose = limits.max_pixels, ""
    if name == "JPEG2000" and most > MAX_JPEG_2000_PIXELS:
        most, whose = MAX_JPEG_2000_PIXELS, " for JPEG 2000"
    if width * height > most:
        raise MediaTooLargeError(
            f"image is {width} x {height} px = {width * height / 1e6:.6g} megapixels, "
            f"limit {most / 1e6:.6g}{whose}"
        )


def _jpeg_scans(image: ImageFile.ImageFile) -> int:
    """Count the scans up to the end of the first image, or one more than is allowed."""
    assert image.fp is not None
    image.fp.seek(0)
    data = image.fp.read()
    if data.count(b"\xff\xda") <= _MAX_JPEG_SCANS:  # thumbnails' and appended videos' included
        return 1
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
    reason = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in reason:
        return MediaTooLargeError(f"{name} image takes more memory than its pixels do")
    # Only the kind of failure is passed on: Pillow's texts may quote the file's bytes.
    if isinstance(error, EOFError) or "truncat" in reason or "not enough" in reason:
        return MediaError(f"{name} image is truncated")
    return MediaError(f"{name} image is damaged or truncated ({type(error).__name__})")


def _guess(start: bytes) -> str:
    """The apparent type of the bytes: most often a web page or an error in JSON."""
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
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
