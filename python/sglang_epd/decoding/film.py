"""A video that a child has open, as a server sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_epd.media import MediaLimits, VideoFacts, check_frames_read


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

        Raises:
            IndexError: there is no such frame.
            MediaTooLargeError: they are too many pixels together, with those read before.
            MediaError: the file is damaged.
        """
        frames = self.facts.frames
        if not all(-frames <= index < frames for index in indices):
            raise IndexError(f"a video of {frames} frames")
        before = self._count
        self.admit(len(indices))
        return self._read([int(index) % frames for index in indices], before)

    def admit(self, count: int) -> None:
        """So many frames more are about to be read, here or on an accelerator.

        Raises:
            MediaTooLargeError: they are too many pixels together, with those read before.
        """
        check_frames_read(self.facts, self._count + count, self._limits)
        self._count += count
