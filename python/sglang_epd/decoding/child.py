"""A decoding child: one item after the other, each within its own bounds.

Forked by a server's nursery. The kernel refuses memory beyond RLIMIT_AS, and ends the
child at RLIMIT_CPU; nothing of an item outlives it here but what libraries keep, and a
child that has grown is replaced by the server.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

from sglang_epd.decoding import messages
from sglang_epd.decoding.messages import TO_CHILD, Drop, Failed, Look, Needs, Picture, Read
from sglang_epd.errors import EpdError, MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits
from sglang_epd.media.decode import open_image, read_image
from sglang_epd.processes.packets import close_all, receive_now, send_now, write_file, write_parts

# What a look may cost in processor time: the index of the longest video takes a second, a
# picture's header milliseconds.
_LOOK_CPU_S = 10
_HEADER_CPU_S = 1
# A picture, and each megapixel of it beyond that: 100 megapixels of JPEG 2000 take 7 s.
_PICTURE_CPU_S = 5
_MEGAPIXEL_CPU_S = 0.4
_SOUND_CPU_S = 60
_PAGE = os.sysconf("SC_PAGE_SIZE")


def serve(end: socket.socket, options: dict[str, Any]) -> None:
    """Decode what the server sends, until it is gone.

    Args:
        options: numbers of `MediaLimits`.
    """
    child = _Child(end, MediaLimits(**options))
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
        self._video: Any = None

    def take(self, message: Any, fds: list[int]) -> None:
        answer: tuple[Any, list[int]]
        try:
            if isinstance(message, Drop):
                self._video = None
                return
            if isinstance(message, Look):
                answer = self._look(message, fds[0])
            elif isinstance(message, Read):
                allow(message.allowed_bytes, message.cpu_s)
                answer = self._video.read(message.indices, message.threads)
        except EpdError as error:
            answer = Failed(error.code, error.message), []
        except Exception as error:
            answer = _failed(error), []
        finally:
            close_all(fds)
        send_now(self._end, *answer)
        close_all(answer[1])

    def _look(self, look: Look, fd: int) -> tuple[Any, list[int]]:
        if look.modality == "IMAGE":
            return self._picture(look, fd)
        allow(look.allowed_bytes, _LOOK_CPU_S if look.modality == "VIDEO" else _SOUND_CPU_S)
        data = Path(f"/proc/self/fd/{fd}").read_bytes()
        # Only here: they import torch, which takes seconds.
        if look.modality == "VIDEO":
            from sglang_epd.decoding.video import open_video

            self._video, opened = open_video(data, self._limits)
            return opened, []
        from sglang_epd.decoding.sound import decode

        samples = decode(data, look.rate_hz, self._limits)
        return messages.Sound(len(samples)), [write_file(samples.data)]

    def _picture(self, look: Look, fd: int) -> tuple[Any, list[int]]:
        allow(look.allowed_bytes, _HEADER_CPU_S)
        size = os.fstat(fd).st_size
        with os.fdopen(os.dup(fd), "rb") as file:
            image, name = open_image(file, self._limits)
            child_bytes, total_bytes = needs(image.width * image.height, name, size)
            if child_bytes > look.allowed_bytes:
                return Needs(child_bytes, total_bytes), []
            megapixels = image.width * image.height / 1e6
            allow(look.allowed_bytes, _PICTURE_CPU_S + int(_MEGAPIXEL_CPU_S * megapixels))
            made = read_image(image, name, self._limits)
        return Picture(*made.size), [_in_a_file(made)]


def needs(count: int, name: str, nbytes: int) -> tuple[int, int]:
    """Bytes that a picture takes: here, and at most anywhere at a time.

    Args:
        count: of its pixels.
        name: of its format.
        nbytes: of its file.
    """
    here = count * _PIXEL_BYTES.get(name, _OTHERS_PIXEL_BYTES) + nbytes + _PICTURE_BYTES
    # In the server the file of pixels goes when Pillow's image has been made.
    return here, max(here + 3 * count, _PREPARED_PIXEL_BYTES * count) + nbytes


# Most addresses that Pillow 13 took for a pixel of pictures of 20 megapixels, of all modes
# and kinds of compression, up to its RGB copy. JPEG 2000 with an alpha channel 23.6 (RGB 19.6);
# WebP 16.8; a progressive JPEG in CMYK 11.3, PNG 7.9, AVIF 9.5, the others less.
_PIXEL_BYTES = {"JPEG2000": 26, "WEBP": 19}
_OTHERS_PIXEL_BYTES = 13
# Of a small picture it is the libraries' tables and buffers that count.
_PICTURE_BYTES = 8 << 20
# Most that preparing takes of the server's memory for each pixel, with Pillow's four:
# GLM-4V's processor, which goes to float32, 22; Qwen's, CLIP's, Pixtral's and SigLIP's 6.
_PREPARED_PIXEL_BYTES = 26
_STRIP_BYTES = 1 << 20


def _in_a_file(image: Any) -> int:
    """Pixels of an RGB image as a file in memory, strip by strip."""
    width, height = image.size
    rows = max(1, _STRIP_BYTES // (3 * width))
    if rows >= height:
        return write_file(image.tobytes())
    strips = ((0, top, width, min(top + rows, height)) for top in range(0, height, rows))
    return write_parts(image.crop(strip).tobytes() for strip in strips)


def allow(nbytes: int, cpu_s: int) -> None:
    """Let this process grow by so many bytes, and work for so many seconds, from now."""
    with Path("/proc/self/statm").open() as file:
        size = int(file.read().split(maxsplit=1)[0]) * _PAGE
    _set(resource.RLIMIT_AS, size + nbytes)
    _set(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)


def _set(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


_TOO_LARGE = "it takes more memory to decode than media of its size do"


def _failed(error: Exception) -> Failed:
    """What the server is told of an error that a library raised."""
    detail = f"{type(error).__name__}: {error}"
    memory = ("memory", "bad_alloc", "Cannot allocate")
    if isinstance(error, MemoryError) or any(word in str(error) for word in memory):
        return Failed(MediaTooLargeError.__name__, _TOO_LARGE, detail[:1000])
    return Failed(MediaError.__name__, "it is damaged or truncated", detail[:1000])
