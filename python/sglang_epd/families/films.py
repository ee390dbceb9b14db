"""Videos as SGLang hands them to its processors: decoders, which read only the frames that a
processor asks for.

SGLang opens a file itself. Here it gets decoders that are open: one of a user's file, whose
frames come from the process that has it open, as many as are allowed, however a processor
picks them; and one of frames that are in no file, so that prompts with videos can be laid
out on a server that has no FFmpeg.

Leans on `utils.video_decoder.VideoDecoderWrapper`, and on `utils.common.load_video`, which
hands on a tuple as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from sglang_epd.media import VideoFacts


@functools.cache
def _apart() -> Any:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    class Apart(VideoDecoderWrapper):
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
            """Nothing: it ends with its item, and a drawn one may be shown again."""

    return Apart


@functools.cache
def _handed_on() -> Any:
    base: Any = _apart()

    class HandedOn(base, tuple):
        def __new__(cls, *_args: Any) -> Any:
            return tuple.__new__(cls)

    return HandedOn


def apart(film: Any) -> Any:
    """A decoder of a video that another process has open (`decoding.Film`), for processors. (Some
    take a tuple of two for frames and what is known of them.)"""
    return _apart()(film)


def handed_on(film: Any) -> Any:
    """The same for where SGLang loads a request's videos first."""
    return _handed_on()(film)


class _Grey:
    """Frames that are in no file, as a `decoding.Film` has them."""

    def __init__(self, facts: VideoFacts) -> None:
        self.facts = facts

    def read(self, indices: list[int]) -> np.ndarray:
        return np.full((len(indices), self.facts.height, self.facts.width, 3), 127, np.uint8)


def drawn(frames: int, width: int, height: int, frames_per_second: float) -> Any:
    """A decoder of grey frames.

    Args:
        width, height: in pixels.
    """
    return handed_on(_Grey(VideoFacts(frames, width, height, frames_per_second)))
