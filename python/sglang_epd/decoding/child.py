"""A decoding child: one item after the other, each within its own memory and processor time.

Forked by a server's nursery. The kernel refuses memory beyond RLIMIT_AS, and ends the
child when its processor time is over (ITIMER_PROF). Nothing of an item outlives it here
but the memory that libraries keep; the server replaces a child that has grown.
"""

from __future__ import annotations

import io
import math
import os
import resource
import signal
import socket
from typing import Any

from PIL import AvifImagePlugin

from sglang_epd.decoding.canvas import Canvas
from sglang_epd.decoding.messages import (
    TO_CHILD,
    Array,
    Drop,
    Look,
    Needs,
    NotDecoded,
    Picture,
    ReadFrames,
)
from sglang_epd.errors import EpdError, MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits, image_size
from sglang_epd.media.decode import check_size, open_image, read_image
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO
from sglang_epd.processes.packets import close_all, read_file, receive_now, send_now, write_file

# Processor time of a look: three hours of sound and 18,000 frames in 56 MiB take
# 0.5 s, 17,000 frames alone 0.02 s, a picture's header milliseconds. FFmpeg takes quadratic
# time for some indices.
_LOOK_CPU_S = 0.5
_LOOK_MB_CPU_S = 0.05
_HEADER_CPU_S = 1
# A picture, which takes milliseconds, and each megapixel of it beyond that: 20 times what the
# slowest take, AVIF with an alpha channel 0.06 s, noise in lossless JPEG 2000 0.3 s.
_PICTURE_CPU_S = 1
_MEGAPIXEL_CPU_S = {"JPEG2000": 6.0}
_OTHERS_MEGAPIXEL_CPU_S = 1.2
# Formats whose pictures have one size throughout; a TIFF may be turned.
_PLAIN = ("JPEG", "PNG", "WEBP")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def serve(end: socket.socket, options: dict[str, Any]) -> None:
    """Decode what the server sends, until it is gone.

    Args:
        options: `MediaLimits.plain`.
    """
    # One for each core of the host otherwise, whose stacks alone are more than a picture has.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    child = _Child(end, MediaLimits.read(options))
    while True:
        try:
            message, fds = receive_now(end, TO_CHILD)
        except EOFError:
            return
        child.take(message, fds)


class _Child:
    def __init__(self, end: socket.socket, limits: MediaLimits) -> None:
        self._end = end
        self._limits = limits
        self._canvas = Canvas()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._video: Any = None

    def take(self, message: Any, fds: list[int]) -> None:
        answer: tuple[Any, list[int]]
        try:
            if isinstance(message, Drop):
                self._video = None
                return
            if isinstance(message, Look):
                answer = self._look(message, fds.pop())
            elif isinstance(message, ReadFrames):
                self._allow(message.allowed_bytes, message.cpu_s)
                answer = self._video.read(message.indices, message.threads)
        except EpdError as error:
            answer = NotDecoded(error.code, error.message), []
        except Exception as error:
            answer = _failed(error), []
        finally:
            close_all(fds)
        send_now(self._end, *answer)
        close_all(answer[1])

    def _look(self, look: Look, fd: int) -> tuple[Any, list[int]]:
        nbytes = os.fstat(fd).st_size
        if look.modality == IMAGE:
            self._allow(look.allowed_bytes, _HEADER_CPU_S)
            return self._picture(look, read_file(fd))
        if look.modality == VIDEO:
            self._allow(look.allowed_bytes, _LOOK_CPU_S + _LOOK_MB_CPU_S * nbytes / (1 << 20))
            # Only here: it imports torch, which takes seconds.
            from sglang_epd.decoding.video import open_video

            self._video, opened = open_video(read_file(fd), self._limits)
            return opened, []
        decoder = MODALITIES[look.modality].decoding
        self._allow(look.allowed_bytes, decoder.CPU_S)
        made = decoder.decode(read_file(fd), look.rate_hz, self._limits)
        return Array(made.dtype.name, made.shape), [write_file(made.data)]

    def _picture(self, look: Look, data: bytes) -> tuple[Any, list[int]]:
        if data[8:12] == b"WEBP" and (size := image_size(data)):
            # Pillow makes all of its canvas when it opens the file.
            check_size(size, "WEBP", self._limits)
            if more := _more(look, size, "WEBP", len(data)):
                return more, []
        image, name = open_image(io.BytesIO(data), self._limits)
        if more := _more(look, image.size, name, len(data)):
            return more, []
        megapixel_s = _MEGAPIXEL_CPU_S.get(name, _OTHERS_MEGAPIXEL_CPU_S)
        work(_PICTURE_CPU_S + megapixel_s * image.width * image.height / 1e6)
        # Turned round it has as many.
        behind = 3 * math.prod(look.cut.resized(*image.size)) if look.cut else 0
        if image.mode == "RGB" and name in _PLAIN:
            # Decoded there, and not copied.
            image.im = self._canvas.blank(image.size, behind).im
        made = read_image(image, name, self._limits, smart_rgb=look.smart_rgb)
        del image  # its memory is free before more is taken
        size = made.size
        self._canvas.hold(made, behind)
        del made
        if look.cut:
            from sglang_epd.decoding.patches import cut_out

            cut_out(self._canvas.pixels, size, look.cut)
        return Picture(*size), self._canvas.tell()

    def _allow(self, nbytes: int, cpu_s: float) -> None:
        """Let this process grow by so many bytes, and work for so many seconds, from now."""
        size = int(os.pread(self._statm, 100, 0).split()[0]) * _PAGE
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, hard))
        work(cpu_s)


def _more(look: Look, size: tuple[int, int], name: str, nbytes: int) -> Needs | None:
    """The bytes that a picture takes, where they are more than the child may use."""
    cut_pixels = math.prod(look.cut.resized(*size)) if look.cut else 0
    count = size[0] * size[1]
    child_bytes, total_bytes = needs(count, name, nbytes, cut_pixels, smart_rgb=look.smart_rgb)
    return Needs(child_bytes, total_bytes) if child_bytes > look.allowed_bytes else None


def needs(
    count: int, name: str, nbytes: int, cut_pixels: int = 0, *, smart_rgb: bool = False
) -> tuple[int, int]:
    """Bytes that a picture takes: here, and at most anywhere at a time.

    Args:
        count: of its pixels.
        name: of its format.
        nbytes: of its file.
        cut_pixels: of its patches; without, it is prepared in the server.
        smart_rgb: whether it is laid over a background.
    """
    each = _PIXEL_BYTES.get(name, _OTHERS_PIXEL_BYTES) + _BACKGROUND_PIXEL_BYTES * smart_rgb
    pixels = count * each
    if cut_pixels:
        # Resized first across, then down, four bytes each, when what decoding took is free.
        resizing = 4 * (count + max(count, cut_pixels) + cut_pixels)
        here = max(pixels, resizing) + 3 * cut_pixels + nbytes + _PICTURE_BYTES
        # The server copies the patches, and may have them pinned.
        return here, here + 6 * cut_pixels + nbytes
    here = pixels + nbytes + _PICTURE_BYTES
    # The file of pixels, which is in `here`, stays beside Pillow's image of the server.
    return here, max(here + 4 * count, (4 + _PREPARED_PIXEL_BYTES) * count) + nbytes


# Most addresses that Pillow 13 took for a pixel of pictures of 20 megapixels, of all modes
# and kinds of compression, up to its RGB copy. JPEG 2000 with an alpha channel 23.6 (RGB 19.6);
# WebP 16.8; a progressive JPEG in CMYK 11.3, PNG 7.9, AVIF 9.5, the others less.
_PIXEL_BYTES = {"JPEG2000": 26, "WEBP": 19}
_OTHERS_PIXEL_BYTES = 13
# A picture with a grey and an alpha channel has three copies, and is written to the canvas.
_BACKGROUND_PIXEL_BYTES = 4
# Of a small picture it is the libraries' tables and buffers that count.
_PICTURE_BYTES = 8 << 20
# Most that preparing takes of the server's memory for each pixel, with Pillow's four:
# GLM-4V's processor, which goes to float32, 22; Qwen's, CLIP's, Pixtral's and SigLIP's 6.
_PREPARED_PIXEL_BYTES = 26


def work(cpu_s: float) -> None:
    """Let this process work for so many seconds of processor time from now; then it dies."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


_TOO_LARGE = "it takes more memory to decode than media of its size do"


def _failed(error: Exception) -> NotDecoded:
    """The message to the server about an error that a library raised."""
    detail = f"{type(error).__name__}: {error}"
    memory = ("memory", "bad_alloc", "Cannot allocate")
    if isinstance(error, MemoryError) or any(word in str(error) for word in memory):
        return NotDecoded(MediaTooLargeError.__name__, _TOO_LARGE, detail[:1000])
    return NotDecoded(MediaError.__name__, "it is damaged or truncated", detail[:1000])
