"""Which pictures are decoded where pixels are made on a GPU; a CPU stands for it here."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sglang_epd.encoder.model.gpu_pixels import GpuPixels
from sglang_epd.media import MediaLimits

# Torchvision's decoders are what SGLang uses.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
PICTURE = Image.linear_gradient("L").resize((64, 48)).convert("RGB")


def encoded(picture: Image.Image = PICTURE, kind: str = "JPEG", **options: bool) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pixels(**limits: int) -> GpuPixels:
    preprocessor = SimpleNamespace(vision_config={"image": {}, "video": {}})
    return GpuPixels(preprocessor, "cpu", MediaLimits(**limits))


def test_a_jpeg_is_decoded_to_its_pixels() -> None:
    made = pixels().decode(encoded())
    assert made is not None and made.dtype == torch.uint8
    wanted = np.asarray(Image.open(io.BytesIO(encoded())))
    assert np.abs(made.permute(1, 2, 0).numpy().astype(int) - wanted).max() <= 2


@pytest.mark.parametrize(
    "data",
    [
        encoded(kind="PNG"),
        encoded(progressive=True),
        encoded(PICTURE.convert("L")),
        encoded(PICTURE.convert("CMYK")),
        encoded()[:-200],
        encoded()[:100] + b"\xff\xd9",
        b"\xff\xd8\xff\xd9",
        b"",
    ],
    ids=[
        "PNG",
        "progressive",
        "grey",
        "CMYK",
        "cut off",
        "without pixels",
        "without a size",
        "nothing",
    ],
)
def test_anything_else_is_left_to_the_decoders(data: bytes) -> None:
    assert pixels().decode(data) is None


def test_a_picture_that_is_too_large_is_left_to_the_decoders_which_refuse_it() -> None:
    assert pixels(max_pixels=64 * 48).decode(encoded()) is not None
    assert pixels(max_pixels=64 * 48 - 1).decode(encoded()) is None


def test_pictures_are_resized_on_the_device_and_other_media_on_the_cpu() -> None:
    config = {"image": {"device": "cuda"}, "video": {"device": "cuda", "fps": 2.0}}
    GpuPixels(SimpleNamespace(vision_config=config), "cuda:3", MediaLimits())
    assert config == {"image": {"device": "cuda:3"}, "video": {"fps": 2.0}}
