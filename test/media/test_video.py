from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits, VideoFacts, check_frames_read, check_video

LIMITS = MediaLimits(max_video_frames=100, max_video_pixels=1000, max_video_total_pixels=5000)
FACTS = VideoFacts(100, 40, 25, 30.0)


def test_what_is_within_the_limits_passes() -> None:
    check_video(FACTS, LIMITS)
    check_frames_read(FACTS, 5, LIMITS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"frames": 101}, "101 frames, limit 100"),
        ({"width": 41}, "41 x 25 px, limit 1000 px a frame"),
    ],
)
def test_what_is_larger_is_told_by_figures(changes: dict, reason: str) -> None:
    with pytest.raises(MediaTooLargeError, match=reason):
        check_video(replace(FACTS, **changes), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 0},
        {"width": 0},
        {"frames_per_second": None},
        {"frames_per_second": 0.0},
        {"frames_per_second": float("nan")},
        {"frames_per_second": float("inf")},
        {"frames_per_second": 1e-12},  # a century for a clip
    ],
)
def test_what_cannot_be_is_refused(changes: dict) -> None:
    with pytest.raises(MediaError, match=r"no frames|frame rate"):
        check_video(replace(FACTS, **changes), LIMITS)


def test_the_frames_that_are_read_have_a_limit_together() -> None:
    with pytest.raises(MediaTooLargeError, match="6 frames of 40 x 25 px"):
        check_frames_read(FACTS, 6, LIMITS)
