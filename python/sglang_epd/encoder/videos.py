"""A look at a video file before any frame of it is decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_epd.errors import MediaError
from sglang_epd.media import MediaLimits, VideoFacts, check_container, check_video

logger = logging.getLogger(__name__)


def open_checked(
    data: bytes, limits: MediaLimits, open_video: Callable[[bytes], Any]
) -> tuple[Any, VideoFacts]:
    """The decoder of a file that is within the limits, to be closed, and what it says.

    Args:
        open_video: makes a decoder, one of SGLang's `VideoDecoderWrapper`.

    Raises:
        MediaError: it is no video, or damaged, or larger than allowed.
    """
    check_container(data, limits)
    try:
        # Reads the file's packets through, and decodes none of them.
        video = open_video(data)
        height, width = video.frame_shape
        facts = VideoFacts(len(video), width, height, video.avg_fps)
    except (RuntimeError, ValueError, TypeError) as error:
        logger.warning("FFmpeg does not open this video: %s", error)
        raise MediaError("the video is damaged or truncated") from error
    check_video(facts, limits)
    return video, facts


def can_be_read() -> bool:
    """Whether FFmpeg's libraries are there; says so in the log where they are not."""
    from sglang.srt.utils import video_decoder

    if video_decoder._BACKEND != "torchcodec":
        return True
    from torchcodec._core import ffmpeg_major_version

    if ffmpeg_major_version is None:
        logger.warning("FFmpeg's libraries cannot be loaded: this encoder takes no videos")
    return ffmpeg_major_version is not None
