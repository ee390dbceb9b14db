"""Videos as SGLang hands them to its processors: decoders, which read of a file what a
processor asks for.

SGLang opens a file itself. Here it gets decoders that are open: one that counts what is read
of a user's file, so that no processor, however it picks frames, holds more of them than is
allowed; and one of frames that are in no file, so that prompts with videos can be laid out
on a server that has no FFmpeg.

Leans on `utils.video_decoder.VideoDecoderWrapper`, and on `utils.common.load_video`, which
hands on a tuple as it is: that is why these decoders are tuples.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_epd.media import MediaLimits, VideoFacts, check_frames_read

_HANDED_ON: Any = tuple


@functools.cache
def counted() -> Any:
    """The class of decoders that count: (data, device), then `allow`."""
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    class Counted(VideoDecoderWrapper, _HANDED_ON):
        _allowed: tuple[VideoFacts, MediaLimits] | None = None
        _read = 0

        def __new__(cls, *_args: Any, **_options: Any) -> Any:
            return tuple.__new__(cls)

        def allow(self, facts: VideoFacts, limits: MediaLimits) -> None:
            """Only so many frames from here on.

            Raises, where more are read:
                MediaTooLargeError: they are too many pixels together.
            """
            self._allowed = facts, limits

        def __getitem__(self, index: Any) -> Any:
            self._count(1)
            return super().__getitem__(index)

        def get_frames_at(self, indices: list[int]) -> Any:
            self._count(len(indices))
            return super().get_frames_at(indices)

        def get_frames_as_tensor(self, indices: list[int]) -> Any:
            self._count(len(indices))
            return super().get_frames_as_tensor(indices)

        def _count(self, frames: int) -> None:
            if self._allowed is not None:
                self._read += frames
                check_frames_read(self._allowed[0], self._read, self._allowed[1])

    return Counted


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


def device_of(processor: Any) -> str:
    """Where one server has FFmpeg decode videos for this processor, if it can."""
    return "cpu" if type(processor).video_preprocessing_device == "cpu" else "cuda"
