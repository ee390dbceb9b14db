"""Which pictures are decoded where pixels are made on a GPU; a CPU stands for it here."""

from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from devices.late import LateDevice
from media import samples
from sglang_epd.device import Device, device_of
from sglang_epd.encoder.model.gpu_pixels import GpuPixels
from sglang_epd.media import MediaLimits

# Torchvision's decoders are what SGLang uses.
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
PICTURE = Image.linear_gradient("L").resize((64, 48)).convert("RGB")


def encoded(picture: Image.Image = PICTURE, kind: str = "JPEG", **options: bool) -> bytes:
    return samples.encoded(picture, kind, **options)


def pixels(**limits: int) -> GpuPixels:
    preprocessor = SimpleNamespace(vision_config={"image": {}, "video": {}})
    return GpuPixels(preprocessor, device_of("cpu"), MediaLimits(**limits))


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


def test_a_large_picture_is_decoded_in_memory_that_is_counted() -> None:
    assert pixels().decode(encoded(PICTURE.resize((4096, 4096)))) is not None
    assert pixels().decode(encoded(PICTURE.resize((4096, 4097)))) is None


class _Third(Device):
    name = torch.device("cuda", 3)


def test_pictures_are_resized_on_the_device_and_other_media_on_the_cpu() -> None:
    config = {"image": {"device": "cuda"}, "video": {"device": "cuda", "fps": 2.0}}
    GpuPixels(SimpleNamespace(vision_config=config), _Third(), MediaLimits())
    assert config == {"image": {"device": "cuda:3"}, "video": {"fps": 2.0}}


class Nvjpeg(GpuPixels):
    """Decodes as torchvision does: into memory of the current stream, by work on another one that
    does not wait for it; the current one waits for that."""

    value = 0

    def _read(self, data: torch.Tensor) -> torch.Tensor:
        made = self._device.empty((3, 8, 8), torch.uint8)
        private = self._device.stream()
        with self._device.use(private):
            made.fill_(self.value)
        self._device.current().wait_event(private.record_event())
        return made


def test_a_picture_is_not_written_over_what_another_is_still_resized_from() -> None:
    data = encoded()
    for seed in range(40):
        device = LateDevice(seed)
        decoder = Nvjpeg(SimpleNamespace(vision_config={}), device, MediaLimits())
        resized = []
        for value in range(1, 6):
            decoder.value = value
            made = decoder.decode(data)
            assert made is not None
            resized.append(made * 2)  # queued; its picture goes
        assert [int(one.cpu().max()) for one in resized] == [2, 4, 6, 8, 10], seed
