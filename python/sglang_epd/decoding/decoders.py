"""The server's side of decoding: the child of each item, and its allowance.

Blocking, for worker threads. Each item has a place, of which there are as many as items
are prepared side by side. A place comes with a child and some memory, enough for any
look and for nearly all pictures. An item that takes more asks the budget; while it waits
for bytes it gives its place and its child back, so that small ones pass it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import msgspec
import numpy as np
from PIL import Image

from sglang_epd.decoding.budget import Budget, Charge
from sglang_epd.decoding.canvas import picture
from sglang_epd.decoding.messages import (
    TO_SERVER,
    Array,
    Cut,
    Drop,
    Look,
    Needs,
    NotDecoded,
    ReadFrames,
)
from sglang_epd.errors import (
    DeadlineError,
    MediaError,
    ProtocolError,
    RequestCancelledError,
    UnavailableError,
    from_code,
)
from sglang_epd.media import MediaLimits, VideoFacts, check_frames_read
from sglang_epd.modality import IMAGE, MODALITIES, VIDEO
from sglang_epd.processes.nursery import Child, Nursery
from sglang_epd.processes.packets import SEALS, receive_now, send_now, write_file

logger = logging.getLogger(__name__)

_CHILD = "sglang_epd.decoding.child:serve"
_PICTURES = ("sglang_epd.decoding.child",)
_PATCHES = ("sglang_epd.decoding.patches", *_PICTURES)
_FILMS = ("sglang_epd.decoding.video", *_PICTURES)
# Set aside for each place: 1080p, the index of an hour of video, a minute of sound.
SMALL_BYTES = 64 << 20
# Files up to this are covered by it, twice: in memory, and where the child has read them.
_SMALL_FILE_BYTES = 8 << 20
# Most that preparing takes of the server's memory for each pixel of a frame: three for the
# frame, and 21 where it goes to float32 while it is made smaller.
_FRAME_PIXEL_BYTES = 24
# A decoder keeps up to 16 frames for reference and some on their way, of 10 bits a colour.
_DECODER_FRAMES = 20
_DECODER_PIXEL_BYTES = 3
_DECODER_BYTES = 80 << 20
_MOST_THREADS = 16
# A child that has kept so much more than it began with is replaced.
_GROWN_BYTES = 64 << 20
_LONGEST_S = 600.0
_END_S = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BROKEN = "it cannot be decoded: its decoder is broken"


class Decoders:
    """Decodes items in children; safe to use from any thread.

    Args:
        limits: bounds on one item.
        budget_bytes: for all that is decoded at a time, from the first look until items
            have been prepared.
        places: items that are decoded and prepared side by side.
        cuts: whether patches will be asked for, so that children import torch beforehand.
    """

    def __init__(
        self, limits: MediaLimits, budget_bytes: int, places: int, *, cuts: bool = False
    ) -> None:
        # Two: one that waits to grow must not hold the only place.
        places = max(2, places)
        self.small_bytes = min(SMALL_BYTES, budget_bytes // (2 * places))
        self.places = Budget(places)
        self.budget = Budget(budget_bytes - places * self.small_bytes)
        self.limits = limits
        options = limits.plain()
        self.pictures = _Children(_PATCHES if cuts else _PICTURES, options)
        decoders = [row.decoder for row in MODALITIES.values() if row.decoder]
        self.films = _Children([*_FILMS, *decoders], options, opens_videos=True)

    @property
    def waiting(self) -> int:
        """Items that wait for bytes, and hold nothing meanwhile."""
        return self.budget.waiting

    def start(self) -> None:
        """Start the nursery of pictures, without waiting for it."""
        self.pictures.nursery.start()

    def begin(self, deadline: float = math.inf) -> Decoding:
        """One item, whose memory is accounted for until the context ends.

        Args:
            deadline: by `time.monotonic`; decoding is ended then.
        """
        return Decoding(self, min(deadline, time.monotonic() + _LONGEST_S))

    def close(self) -> None:
        """End all children."""
        self.pictures.close()
        self.films.close()


class Decoding:
    """One item on its way; for one thread, but for `stop`.

    Results of its methods may be used until the context ends, and are charged until then.
    Each raises, beside its own errors:
        DeadlineError: the deadline passed, or decoding has taken ten minutes.
        MediaTooLargeError: decoding takes more memory than an item may have.
        MediaError: it cannot be decoded; also where a decoder crashed.
        RequestCancelledError: it was stopped.
        UnavailableError: no process can be started, or all of them ended.
    """

    def __init__(self, decoders: Decoders, deadline: float) -> None:
        self._decoders = decoders
        self._deadline = deadline
        self._place = Charge()
        self._charge = Charge()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._children = decoders.pictures
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._let_go()

    def stop(self) -> None:
        """End its child, because the item is no longer wanted; from any thread."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.process.kill()
        self._decoders.places.stop(self._place)
        self._decoders.budget.stop(self._charge)

    def image(self, data: bytes, *, smart_rgb: bool = False) -> Image.Image:
        """A picture, RGB: the pixels of `media.decode.read_image`."""
        size, pixels = self._picture(data, None, smart_rgb)
        return picture(pixels, size).copy()

    def patches(self, data: bytes, cut: Cut) -> tuple[np.ndarray, tuple[int, int]]:
        """A picture's patches, uint8 [patches, 3 * patch * patch], and how many there are down
        and across."""
        (width, height), pixels = self._picture(data, cut)
        across, down = (side // cut.patch for side in cut.resized(width, height))
        flat = np.frombuffer(pixels, np.uint8, 3 * cut.patch**2 * across * down, 4 * width * height)
        return flat.reshape(across * down, -1).copy(), (down, across)

    def _picture(
        self, data: bytes, cut: Cut | None, smart_rgb: bool = False
    ) -> tuple[tuple[int, int], Any]:
        """A picture's size, and the memory that it is in."""
        allowed = self._decoders.small_bytes + _twice(data) // 2
        made, fd = self._look(Look(IMAGE, allowed, cut=cut, smart_rgb=smart_rgb), data)
        assert self._child is not None
        size = made.width, made.height
        behind = 3 * math.prod(cut.resized(*size)) if cut else 0
        return size, self._child.pixels(fd, 4 * made.width * made.height + behind)

    def array(self, modality: str, data: bytes, rate_hz: int = 0) -> np.ndarray:
        """What the modality's own decoder makes of an item (`Modality.decoder`).

        Args:
            rate_hz: samples a second that a sound is to have.
        """
        need = MODALITIES[modality].decoding.needed_bytes(rate_hz, self._decoders.limits)
        self._children = self._decoders.films
        self._take(need + 2 * len(data))
        return _mapped_array(*self._look(Look(modality, need + len(data), rate_hz), data))

    def video(self, data: bytes) -> Film:
        """A video, none of whose frames is decoded yet."""
        self._children = self._decoders.films
        facts, _ = self._look(Look(VIDEO, self._decoders.small_bytes + len(data)), data)
        return Film(facts, self._decoders.limits, partial(self._frames, facts, data))

    def _frames(self, facts: VideoFacts, data: bytes, indices: list[int], before: int) -> Any:
        pixels = facts.width * facts.height
        decoder = _DECODER_FRAMES * _DECODER_PIXEL_BYTES * pixels + _DECODER_BYTES
        frames = before + len(indices)
        total = frames * pixels * _FRAME_PIXEL_BYTES + _twice(data)
        # A quarter of the budget, or what the frames leave of it.
        most = self._decoders.budget.total
        able = min(most // 4, most - total) // decoder
        threads = max(1, min(os.cpu_count() or 8, _MOST_THREADS, len(indices), able))
        total += threads * decoder
        if before or not self._take(total, wait=False):
            if before:
                self._take(total)
            else:
                self._let_go()
                self._take(total)
                self._look(Look(VIDEO, self._decoders.small_bytes + len(data)), data)
        nbytes = 3 * pixels * len(indices)
        left = max(0.0, self._deadline - time.monotonic())
        told = ReadFrames(indices, threads, nbytes + threads * decoder, 1 + int(threads * left))
        read = _mapped_array(*self._ask(told))
        if read.shape != (len(indices), facts.height, facts.width, 3):
            raise MediaError(_BROKEN)
        return read

    def _look(self, look: Look, data: bytes) -> tuple[Any, int]:
        """Show the item to a child, and return its answer."""
        if not self._charge.nbytes and _twice(data):
            self._take(_twice(data))
        file = write_file(data)
        try:
            while True:
                answer, fd = self._ask(look, file)
                if not isinstance(answer, Needs):
                    return answer, fd
                if answer.total_bytes > self._charge.nbytes and not self._take(
                    answer.total_bytes, wait=False
                ):
                    self._let_go()
                    self._take(answer.total_bytes)
                look = msgspec.structs.replace(look, allowed_bytes=answer.child_bytes)
        finally:
            os.close(file)

    def _take(self, nbytes: int, *, wait: bool = True) -> bool:
        budget = self._decoders.budget
        if wait:
            budget.raise_to(self._charge, nbytes, self._deadline)
            return True
        return budget.try_raise(self._charge, nbytes)

    def _ask(self, message: Any, *fds: int) -> tuple[Any, int]:
        """The child's answer, and the descriptor that came with it, -1 for none.

        Raises:
            EpdError: the child's own, or one for its end.
        """
        child = self._held()
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            child.process.end.settimeout(left)
            send_now(child.process.end, message, fds)
            answer, got = receive_now(child.process.end, TO_SERVER)
        except TimeoutError:
            self._end_child()
            raise DeadlineError("the request's deadline passed while it was decoded") from None
        except (EOFError, OSError, ProtocolError):
            # A child that sends no valid answer may send more, which would be the next item's.
            self._end_child()
            if self._stopped:
                raise RequestCancelledError("it is no longer wanted") from None
            if child.process.orphaned:
                raise UnavailableError("the process that starts decoders ended") from None
            logger.warning("A decoding process (pid %d) died over an item", child.process.pid)
            raise MediaError(
                "it cannot be decoded: its decoder crashed, or took too long"
            ) from None
        if isinstance(answer, NotDecoded):
            if answer.detail:
                logger.warning("Not decoded: %s", ascii(answer.detail))
            raise from_code(answer.code, answer.message)
        return answer, got[0] if got else -1

    def _held(self) -> _Child:
        if self._child is not None:
            return self._child
        self._decoders.places.raise_to(self._place, 1, self._deadline)
        child = self._children.take()
        with self._lock:
            self._child = child
            if self._stopped:
                child.process.kill()
        return child

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.end()

    def _let_go(self) -> None:
        """Of the child, the place and the bytes; not before a killed child's are free."""
        with self._lock:
            child, self._child = self._child, None
            stopped = self._stopped
        if child is not None:
            if stopped:
                child.end()
            else:
                self._children.give(child)
        self._decoders.places.release(self._place)
        self._decoders.budget.release(self._charge)


class _Child:
    """A child of a kind, and how large it was before its first item."""

    def __init__(self, process: Child) -> None:
        self.process = process
        self._pixels: mmap.mmap | bytes = b""
        self._lost_pixels = False
        self._first_bytes = self._held_bytes()

    @property
    def spent(self) -> bool:
        """Whether it holds too much, or draws in a file that is not mapped here."""
        return self._lost_pixels or self._held_bytes() > self._first_bytes + _GROWN_BYTES

    def pixels(self, fd: int, nbytes: int) -> mmap.mmap | bytes:
        """Its picture's, until it is sent the next item.

        Args:
            fd: of the file that they are in from now on, taken over; -1: where they were.

        Raises:
            MediaError: there are not as many.
        """
        if fd >= 0:
            self._lost_pixels = True
            self._pixels = _mapped(fd, nbytes)
            self._lost_pixels = False
        if len(self._pixels) < nbytes:
            raise MediaError(_BROKEN)
        return self._pixels

    def end(self) -> None:
        """Kill it; its memory is free when it returns."""
        self.process.kill()
        if not self.process.ended(_END_S):
            logger.error("A decoding process (pid %d) does not end", self.process.pid)
        self.process.close()

    def _held_bytes(self) -> int:
        path = f"/proc/{self.process.pid}/statm"
        try:
            with os.fdopen(os.open(path, os.O_RDONLY), "rb", buffering=0) as file:
                return int(file.read().split()[1]) * _PAGE
        except (OSError, IndexError):  # it ended: the next to take it sees that
            return 0


class _Children:
    """Children that import the same, and wait for items."""

    def __init__(
        self, modules: Sequence[str], options: dict[str, Any], *, opens_videos: bool = False
    ) -> None:
        self.nursery = Nursery(modules)
        self._options = options
        self._opens_videos = opens_videos
        self._idle: list[_Child] = []

    def take(self) -> _Child:
        """A child that has no item.

        Raises:
            UnavailableError: none can be started.
        """
        while self._idle:
            try:
                child = self._idle.pop()
            except IndexError:  # another thread was first
                break
            if not child.process.ended():
                return child
            child.process.close()
        return _Child(self.nursery.child(_CHILD, self._options))

    def give(self, child: _Child) -> None:
        """Its item is over."""
        try:
            if self._opens_videos:
                child.process.end.settimeout(_END_S)
                send_now(child.process.end, Drop())
            spent = child.spent
        except OSError:
            spent = True
        if spent:
            child.end()
        else:
            self._idle.append(child)

    def close(self) -> None:
        self.nursery.close()
        while self._idle:
            self._idle.pop().process.close()


def _twice(data: bytes) -> int:
    """Bytes of an item's file, and of the child's copy, where they are not a place's own."""
    return 2 * len(data) if len(data) > _SMALL_FILE_BYTES else 0


def _mapped_array(made: Array, fd: int) -> np.ndarray:
    """The array that a child says is in a file; the descriptor is taken over."""
    dtype = np.dtype(made.dtype)
    mapped = _mapped(fd, dtype.itemsize * math.prod(made.shape))
    return np.frombuffer(mapped, dtype).reshape(made.shape)


def _mapped(fd: int, nbytes: int) -> Any:
    """A file that a child made, mapped; the descriptor is taken over.

    Raises:
        MediaError: it is not as long as it should be, or could be made shorter.
    """
    try:
        if fd < 0 or os.fstat(fd).st_size != nbytes or not nbytes:
            raise MediaError(_BROKEN)
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise MediaError(_BROKEN)
        # All of it will be read: a page fault for each page costs more.
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        if fd >= 0:
            os.close(fd)


class Film:
    """Frames of a video, read when they are asked for.

    Args:
        facts: the file's header.
        limits: `max_video_total_pixels` applies to all frames read together.
        read: the frames of these indices, and how many were read before.
    """

    def __init__(
        self, facts: VideoFacts, limits: MediaLimits, read: Callable[[list[int], int], Any]
    ) -> None:
        self.facts = facts
        self._limits = limits
        self._read = read
        self._count = 0

    def read(self, indices: Sequence[int]) -> Any:
        """Frames uint8 [count, height, width, 3], in memory that no other process writes to.

        Args:
            indices: of frames; negative ones count from the end.

        Raises:
            IndexError: there is no such frame.
            MediaTooLargeError: they are too many pixels together, with those read before.
            MediaError: the file is damaged.
        """
        frames = self.facts.frames
        if not all(-frames <= index < frames for index in indices):
            raise IndexError(f"a video of {frames} frames")
        before, after = self._count, self._count + len(indices)
        check_frames_read(self.facts, after, self._limits)
        self._count = after
        return self._read([int(index) % frames for index in indices], before)
