"""Decoders that SGLang is handed in place of files."""

from __future__ import annotations

from sglang_epd.families.films import drawn


def test_sglang_hands_them_on_as_they_are(sglang):
    film = drawn(3, 28, 56, 2.0)
    assert sglang("utils").load_video(film) is film


def test_drawn_frames_are_shown_again_after_they_are_closed():
    film = drawn(5, 28, 56, 2.5)
    film.close()
    assert (len(film), film.avg_fps, film.frame_shape) == (5, 2.5, (56, 28))
    assert film.get_frames_at([4, 0]).shape == film.get_frames_as_tensor([1, 1]).shape
    assert film[2].shape == (56, 28, 3)
