"""Images that are decoded and resized on the GPU, as a colocated server does it there.

SGLang's encoder resizes on the CPU, and so does this one, unless
`SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU` asks for the GPU. Then JPEGs are decoded by nvJPEG,
whose colours differ from those of libjpeg by some levels, in this process: its bytes are a
user's, and no other process stands between.

Leans on `disaggregation.encoder.preprocessor.EncoderPreprocessor` (`use_image_processor_gpu`,
`vision_config`), and on `utils.common.is_jpeg_with_cuda`, whose test of a JPEG this one has.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_epd.device import Device
from sglang_epd.media import MediaLimits
from sglang_epd.media.size import image_size

logger = logging.getLogger(__name__)

_JPEG = (b"\xff\xd8", b"\xff\xd9")
# In the pixels of a picture no such bytes can be.
_PROGRESSIVE = b"\xff\xc2"
_COLOURS = 3
# Each thread that prepares has a picture on the device, which no budget counts. Larger ones are
# decoded on the CPU, where `SGLANG_EPD_DECODE_MB` counts them.
_MOST_PIXELS = 16 << 20


class GpuPixels:
    """Makes pixels on one device; safe to call from several threads at once.

    Args:
        preprocessor: SGLang's, of an encoder; from now on it resizes pictures on the device,
            and other media on the CPU.
        device: where it makes them.
        limits: bounds on decoding.
    """

    def __init__(self, preprocessor: Any, device: Device, limits: MediaLimits) -> None:
        self._device = device
        self._name = str(device.name)
        self._most = min(limits.max_pixels, _MOST_PIXELS)
        # Of its own: nvJPEG writes on a stream that does not wait for the current one, so what
        # it writes to must not be memory that queued work of that stream still reads.
        self._decoding = device.stream()
        for modality, config in preprocessor.vision_config.items():
            if isinstance(config, dict):
                config.pop("device", None)
                if modality == "image":
                    # Its threads have no device of their own.
                    config["device"] = self._name

    def decode(self, data: bytes) -> torch.Tensor | None:
        """A JPEG's pixels, uint8 [3, height, width] on the device.

        Returns:
            None for what is to be decoded elsewhere: other formats, progressive JPEGs, any of
            whose scans takes time, pictures without three colours, those of over 16 megapixels, and
            those that nvJPEG does not decode.
        """
        first, last = _JPEG
        if not (data.startswith(first) and data.endswith(last)) or _PROGRESSIVE in data:
            return None
        size = image_size(data)
        if size is None or size[0] * size[1] > self._most:
            return None
        current = self._device.current()
        try:
            with self._device.use(self._decoding):
                pixels = self._read(torch.frombuffer(bytearray(data), dtype=torch.uint8))
                done = self._decoding.record_event()
        except RuntimeError as error:
            logger.info("A JPEG is decoded on the CPU: %s", error)
            return None
        current.wait_event(done)
        self._device.hold(pixels, current)
        return pixels if pixels.shape[0] == _COLOURS else None

    def _read(self, data: torch.Tensor) -> torch.Tensor:
        from torchvision.io import decode_jpeg

        pixels: torch.Tensor = decode_jpeg(data, device=self._name)
        return pixels
