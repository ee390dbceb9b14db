"""Videos as SGLang hands them to its processors: decoders, which read only the frames that a
processor asks for.

SGLang opens a file itself. Here it gets decoders that are open: one of a user's file, whose
frames come from the process that has it open, as many as are allowed, however a processor
picks them; and one of frames that are in no file, so that prompts with videos can be laid
out on a server that has no FFmpeg.

Leans on `utils.video_decoder.VideoDecoderWrapper`, and on `utils.common.load_video`, which
hands on a tuple as it is: that is why these decoders are tuples.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_epd.device.cuda import available

_HANDED_ON: Any = tuple


@functools.cache
def _apart() -> Any:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    class Apart(VideoDecoderWrapper, _HANDED_ON):
        def __new__(cls, *_args: Any) -> Any:
            return tuple.__new__(cls)

        def __init__(self, film: Any) -> None:
            self._film = film

        def __len__(self) -> int:
            return int(self._film.facts.frames)

        def __getitem__(self, index: int) -> Any:
            return self._film.read([index])[0]

        @property
        def avg_fps(self) -> float:
            return float(self._film.facts.frames_per_second)

        @property
        def frame_shape(self) -> tuple[int, int]:
            return self._film.facts.height, self._film.facts.width

        @property
        def source_bytes(self) -> None:
            """Sound inside of videos is not heard."""

        def get_frames_at(self, indices: list[int]) -> Any:
            return self._film.read(indices)

        def get_frames_as_tensor(self, indices: list[int]) -> torch.Tensor:
            return torch.from_numpy(self._film.read(indices))

        def close(self) -> None:
            """Nothing: it ends with its item."""

    return Apart


def apart(film: Any) -> Any:
    """A decoder of a video that another process has open (`decoding.Film`)."""
    return _apart()(film)


@functools.cache
def _drawn() -> Any:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    class Drawn(VideoDecoderWrapper, _HANDED_ON):
        def __new__(cls, *_args: Any) -> Any:
            return tuple.__new__(cls)

        def __init__(self, frames: torch.Tensor, rate: float) -> None:
            self._frames = frames
            self._rate = rate

        def __len__(self) -> int:
            return len(self._frames)

        def __getitem__(self, index: int) -> Any:
            return self._frames[index].numpy()

        @property
        def avg_fps(self) -> float:
            return self._rate

        @property
        def frame_shape(self) -> tuple[int, int]:
            return self._frames.shape[1], self._frames.shape[2]

        def get_frames_at(self, indices: list[int]) -> Any:
            return self._frames[indices].numpy()

        def get_frames_as_tensor(self, indices: list[int]) -> torch.Tensor:
            return self._frames[indices]

        def close(self) -> None:
            """Nothing: it may be shown again."""

    return Drawn


def drawn(frames: int, width: int, height: int, frames_per_second: float) -> Any:
    """A decoder of grey frames."""
    grey = torch.full((frames, height, width, 3), 127, dtype=torch.uint8)
    return _drawn()(grey, frames_per_second)


def on_device(film: Any, data: bytes, processor: Any) -> Any:
    """The decoder of a video on the accelerator, where one server has it there for this
    processor and can; else None."""
    if type(processor).video_preprocessing_device == "cpu" or not available():
        return None
    return _on_device()(film, data)


@functools.cache
def _on_device() -> Any:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    class OnDevice(VideoDecoderWrapper, _HANDED_ON):
        def __new__(cls, *_args: Any) -> Any:
            return tuple.__new__(cls)

        def __init__(self, film: Any, data: bytes) -> None:
            super().__init__(data, "cuda")
            self._film = film

        def __getitem__(self, index: Any) -> Any:
            self._film.admit(1)
            return super().__getitem__(index)

        def get_frames_at(self, indices: list[int]) -> Any:
            self._film.admit(len(indices))
            return super().get_frames_at(indices)

        def get_frames_as_tensor(self, indices: list[int]) -> Any:
            self._film.admit(len(indices))
            return super().get_frames_as_tensor(indices)

    return OnDevice
