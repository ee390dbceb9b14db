"""Media named by their content on a server that encodes them itself, and refused options."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sglang_epd.errors import MediaError
from sglang_epd.seams.identities import REQUEST_OPTIONS, name_items, plan_without_options


class Item(SimpleNamespace):
    def __init__(self, modality: str = "IMAGE") -> None:
        super().__init__(modality=SimpleNamespace(name=modality), identity=None)

    def set_identity(self, identity: bytes) -> None:
        self.identity = identity


def output(*modalities: str) -> SimpleNamespace:
    items = [Item(modality) for modality in modalities]
    return SimpleNamespace(mm_items=items, padded_input_ids=[1, 7, 7, 2])


def given(found: SimpleNamespace) -> list[bytes | None]:
    return [item.identity for item in found.mm_items]


def test_items_are_named_in_order_within_their_modality() -> None:
    found = output("VIDEO", "IMAGE", "IMAGE")
    name_items(found, {"IMAGE": [b"a", b"b"], "VIDEO": [b"c"]})
    assert given(found) == [b"c", b"a", b"b"]
    assert found.padded_input_ids is None, "it holds the old names"


@pytest.mark.parametrize("images", [0, 1, 3])
def test_what_was_made_into_fewer_items_or_more_keeps_its_names(images) -> None:
    found = output(*["IMAGE"] * images, "VIDEO")
    name_items(found, {"IMAGE": [b"a", b"b"]})
    assert not any(given(found))
    assert found.padded_input_ids == [1, 7, 7, 2]


URL = "data:video/mp4;base64," + base64.b64encode(b"film").decode()


@dataclass
class Video:
    """Shaped as SGLang's `VideoData`."""

    url: str
    preprocess_kwargs: dict[str, float] | None = None
    max_long_side_pixel: int | None = None


def asking(video: object = URL, image: object = None, **options: object) -> SimpleNamespace:
    return SimpleNamespace(image_data=image, video_data=[video], audio_data=None, **options)


def test_media_without_options_are_planned():
    image = {"url": URL, "detail": "high"}
    # What SGLang makes of every chat with a video.
    config = {"_question": "What happens?"}
    items = plan_without_options(
        asking(Video(URL), image, video_config=config, max_dynamic_patch=0)
    )
    assert [(item.modality, item.data) for item in items] == [
        ("IMAGE", b"film"),
        ("VIDEO", b"film"),
    ]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (asking(Video(URL, {"fps": 1.0, "max_frames": 4})), "fps, max_frames$"),
        (asking(Video(URL, max_long_side_pixel=64)), "max_long_side_pixel$"),
        (asking({"url": URL, "fps": 1}), "fps$"),
        (asking(video_config={"_question": "What?", "max_pixels": 64}), "max_pixels$"),
        *((asking(**{option: 3}), f"{option}$") for option in REQUEST_OPTIONS),
    ],
)
def test_options_are_refused_by_name(asked, told):
    with pytest.raises(MediaError, match=f"takes no options for its media: {told}"):
        plan_without_options(asked)


def test_what_keeps_a_request_apart_is_no_option_of_its_media():
    (item,) = plan_without_options(asking({"url": URL}, cache_salt="mine"))
    assert item.options.keys() == {"cache_salt"}
