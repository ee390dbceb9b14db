"""Decoders that SGLang is handed in place of files."""

from __future__ import annotations

import pytest

import clips
from sglang_epd.errors import MediaTooLargeError
from sglang_epd.families.films import counted, device_of, drawn
from sglang_epd.media import MediaLimits, VideoFacts

FACTS = VideoFacts(frames=24, width=84, height=56, frames_per_second=8.0)


@pytest.fixture
def film():
    with counted()(clips.video(size=(84, 56)), "cpu") as film:
        yield film


def test_sglang_hands_them_on_as_they_are(sglang, film):
    load = sglang("utils").load_video
    for decoder in (film, drawn(3, 28, 56, 2.0)):
        assert load(decoder) is decoder


def test_frames_are_counted_however_they_are_read(film):
    film.allow(FACTS, MediaLimits(max_video_total_pixels=84 * 56 * 6))
    assert film.get_frames_at([0, 1]).shape == (2, 56, 84, 3)
    assert film.get_frames_as_tensor([2, 3, 4]).shape == (3, 56, 84, 3)
    assert film[5].shape == (56, 84, 3)
    for read in (lambda: film[6], lambda: film.get_frames_at([6])):
        with pytest.raises(MediaTooLargeError, match="frames of 84 x 56 px"):
            read()


def test_drawn_frames_are_shown_again_after_they_are_closed():
    film = drawn(5, 28, 56, 2.5)
    film.close()
    assert (len(film), film.avg_fps, film.frame_shape) == (5, 2.5, (56, 28))
    assert film.get_frames_at([4, 0]).shape == film.get_frames_as_tensor([1, 1]).shape
    assert film[2].shape == (56, 28, 3)


def test_videos_are_decoded_where_one_server_does(sglang):
    base = sglang("multimodal.processors.base_processor").BaseMultimodalProcessor
    for device, expected in ((base.video_preprocessing_device, "cuda"), ("cpu", "cpu")):
        assert device_of(type("Some", (), {"video_preprocessing_device": device})()) == expected
