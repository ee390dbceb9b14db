"""A file of pixels that is used again."""

from __future__ import annotations

import os

from PIL import Image

from sglang_epd.decoding.canvas import Canvas
from sglang_epd.processes.packets import close_all


def held(canvas: Canvas, made: Image.Image) -> list[int]:
    canvas.hold(made)
    return canvas.tell()


def test_a_new_picture_shows_nothing_of_the_last_one() -> None:
    canvas = Canvas()
    close_all(held(canvas, Image.new("RGB", (30, 20), "white")))
    for size in ((30, 20), (7, 11), (60, 40)):
        blank = canvas.blank(size)
        assert blank.size == size
        assert blank.getbbox() is None
        blank.paste("white", (0, 0, *size))


def test_the_server_is_told_of_a_file_once_and_only_of_one_that_it_needs() -> None:
    canvas = Canvas()
    canvas.blank((50, 50))  # of a picture that failed
    first = held(canvas, Image.new("RGB", (30, 20)))
    assert [os.fstat(fd).st_size for fd in first] == [4 * 30 * 20]
    assert held(canvas, Image.new("RGB", (20, 30))) == []
    second = held(canvas, Image.new("RGB", (31, 20)))
    assert [os.fstat(fd).st_size for fd in second] == [4 * 31 * 20]
    close_all([*first, *second])


def test_a_picture_that_was_decoded_there_is_not_copied() -> None:
    canvas = Canvas()
    (fd,) = held(canvas, Image.new("RGB", (4, 3), "blue"))
    made = canvas.blank((4, 3))
    made.paste("red", (0, 0, 4, 3))
    assert held(canvas, made) == []
    assert os.pread(fd, 4 * 4 * 3, 0) == b"\xff\0\0\xff" * 12
    close_all([fd])


def test_a_file_that_was_not_told_of_is_not_drawn_in_again() -> None:
    """What came after it failed: the server would look for the next picture where the last was."""
    canvas = Canvas()
    close_all(held(canvas, Image.new("RGB", (4, 3))))
    canvas.hold(Image.new("RGB", (30, 20)))
    told = held(canvas, Image.new("RGB", (5, 4)))
    assert [os.fstat(fd).st_size for fd in told] == [4 * 5 * 4]
    close_all(told)
