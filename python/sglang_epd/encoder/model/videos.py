"""Whether videos can be read here."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def can_be_read() -> bool:
    """Whether FFmpeg's libraries are there; says so in the log where they are not."""
    from sglang.srt.utils import video_decoder

    if video_decoder._BACKEND != "torchcodec":
        logger.warning("torchcodec cannot be imported: this encoder takes no videos")
        return False
    from torchcodec._core import ffmpeg_major_version

    if ffmpeg_major_version is None:
        logger.warning("FFmpeg's libraries cannot be loaded: this encoder takes no videos")
    return ffmpeg_major_version is not None
