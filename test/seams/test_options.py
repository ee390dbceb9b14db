from __future__ import annotations

import base64
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sglang_epd.errors import MediaError
from sglang_epd.seams.identities import REQUEST_OPTIONS
from sglang_epd.seams.options import plan_without_options

URL = "data:video/mp4;base64," + base64.b64encode(b"film").decode()


@dataclass
class Video:
    """Shaped as SGLang's `VideoData`."""

    url: str
    preprocess_kwargs: dict[str, float] | None = None
    max_long_side_pixel: int | None = None


def request(video: object = URL, image: object = None, **options: object) -> SimpleNamespace:
    return SimpleNamespace(image_data=image, video_data=[video], audio_data=None, **options)


def test_media_without_options_are_planned():
    image = {"url": URL, "detail": "high"}
    # What SGLang makes of every chat with a video.
    config = {"_question": "What happens?"}
    items = plan_without_options(
        request(Video(URL), image, video_config=config, max_dynamic_patch=0)
    )
    assert [(item.modality, item.data) for item in items] == [
        ("IMAGE", b"film"),
        ("VIDEO", b"film"),
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (request(Video(URL, {"fps": 1.0, "max_frames": 4})), "fps, max_frames$"),
        (request(Video(URL, max_long_side_pixel=64)), "max_long_side_pixel$"),
        (request({"url": URL, "fps": 1}), "fps$"),
        (request(video_config={"_question": "What?", "max_pixels": 64}), "max_pixels$"),
        *((request(**{option: 3}), f"{option}$") for option in REQUEST_OPTIONS),
    ],
)
def test_options_are_refused_by_name(asked, told):
    with pytest.raises(MediaError, match=f"takes no options for its media: {told}"):
        plan_without_options(asked)


def test_what_cannot_be_read_is_said_as_ever():
    with pytest.raises(MediaError, match="list of media is empty"):
        plan_without_options(SimpleNamespace(image_data=[], video_data=None, audio_data=None))


def test_what_keeps_a_request_apart_is_no_option_of_its_media():
    (item,) = plan_without_options(request({"url": URL}, cache_salt="mine"))
    assert item.options.keys() == {"cache_salt"}
