"""The cost of a video, by its decoder's facts before the first frame."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media.limits import MediaLimits

# From a picture every three hours to the fastest cameras.
_SLOWEST, _FASTEST = 1e-4, 1e5


@dataclass(frozen=True)
class VideoFacts:
    """A video stream.

    Attributes:
        frames: how many there are in the file.
        width, height: of a frame, in pixels.
        frames_per_second: on average; None where the file does not say.
    """

    frames: int
    width: int
    height: int
    frames_per_second: float | None


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
    if rate is None or not _SLOWEST <= rate <= _FASTEST:  # written so that NaN fails too
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
