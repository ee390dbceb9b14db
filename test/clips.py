"""Short videos and sounds for tests: made when they are needed, the same each time."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import soundfile
import torch

import photographs
import sounds


def moving_crop(
    name: str, *, frames: int = 24, size: tuple[int, int] = (224, 168), step: int = 6
) -> torch.Tensor:
    """A camera that pans over the photograph `name`: uint8 [frames, 3, height, width]."""
    width, height = size
    photo = photographs.load(name).resize((width + step * frames, height + frames))
    views = [
        np.asarray(photo.crop((step * index, index, step * index + width, index + height)))
        for index in range(frames)
    ]
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2).contiguous()


def encode(frames: torch.Tensor, rate: float = 8.0, container: str = "mp4") -> bytes:
    """A video file (H.264 in MP4, VP9 in WebM) of uint8 frames [n, 3, height, width]."""
    from torchcodec.encoders import VideoEncoder  # a second, with what it imports of torch

    return VideoEncoder(frames, frame_rate=rate).to_tensor(format=container).numpy().tobytes()


def heard(frames: torch.Tensor, rate: float = 8.0, rate_hz: int = 16_000) -> bytes:
    """A video file (MP4) of uint8 frames [n, 3, height, width] with a sound as long as they."""
    from torchcodec.encoders import Encoder

    encoder, file = Encoder(), io.BytesIO()
    height, width = frames.shape[-2:]
    video = encoder.add_video(height=height, width=width, frame_rate=rate)
    sound = encoder.add_audio(sample_rate=rate_hz, num_channels=1)
    with encoder.open_file_like(file, format="mp4"):
        video.add_frames(frames)
        samples = sounds.load("low", seconds=len(frames) / rate, rate_hz=rate_hz)
        sound.add_samples(torch.from_numpy(samples).float().unsqueeze(0))
    return file.getvalue()


# The encoder's threads make it of other bytes now and then.
@functools.cache
def video(name: str = "coffee", *, rate: float = 8.0, container: str = "mp4", **crop: Any) -> bytes:
    """A video file of `moving_crop`."""
    return encode(moving_crop(name, **crop), rate, container)


def audio(
    name: str = "middle", *, container: str = "WAV", rate_hz: int = 16_000, seconds: float = 2.0
) -> bytes:
    """A sound file of one of `sounds`."""
    file = io.BytesIO()
    samples = sounds.load(name, seconds=seconds, rate_hz=rate_hz)
    soundfile.write(file, samples, rate_hz, format=container)
    return file.getvalue()


def still(width: int, height: int, frames: int = 4) -> torch.Tensor:
    """Grey frames, which compress to next to nothing."""
    return torch.full((frames, 3, height, width), 127, dtype=torch.uint8)


def samples(file: bytes) -> np.ndarray:
    """What a sound file holds: float32 [samples]."""
    return soundfile.read(io.BytesIO(file), dtype="float32")[0]
