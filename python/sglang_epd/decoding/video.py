"""Videos in a decoding child, read by torchcodec as SGLang's `VideoDecoderWrapper` has it.

Leans on torchcodec's `get_container_metadata`, and on its `VideoDecoder` on the CPU, frame after
frame [height, width, 3].
"""

from __future__ import annotations

import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torchcodec._core import get_container_metadata
from torchcodec.decoders import VideoDecoder

from sglang_epd.decoding.messages import Array
from sglang_epd.errors import MediaError
from sglang_epd.media import MediaLimits, VideoFacts, check_container, check_video
from sglang_epd.processes.packets import new_file

# Frames that a thread reads before they are copied into the file.
BATCH_BYTES = 16 << 20


class Video:
    """An open video file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._decoder = self._open()

    def facts(self) -> VideoFacts:
        """As SGLang reads them; no frame is decoded, unless the file hides its size."""
        told = self._decoder.metadata
        height, width = told.height, told.width
        if not height or not width:
            height, width = self._decoder.get_frame_at(0).data.shape[:2]
        self._shape = int(height), int(width)
        streams = get_container_metadata(self._decoder._decoder)
        sound = streams.best_audio_stream_index is not None
        rate = told.average_fps or math.nan
        return VideoFacts(len(self._decoder), int(width), int(height), rate, sound)

    def read(self, indices: list[int], threads: int) -> tuple[Array, list[int]]:
        """Frames, in a file in memory.

        Args:
            indices: of frames, none of them negative.
            threads: that decode side by side, each with a decoder of its own.
        """
        height, width = self._shape
        shape = len(indices), height, width, 3
        size = math.prod(shape)
        fd = new_file(size)
        try:
            # Not closed by hand: an error on its way still leads to the frames.
            frames = np.frombuffer(mmap.mmap(fd, size), np.uint8)
            self._read_into(frames.reshape(shape), indices, threads)
        except BaseException:
            os.close(fd)
            raise
        return Array("uint8", shape), [fd]

    def _read_into(self, frames: np.ndarray, indices: list[int], threads: int) -> None:
        """As SGLang does: each thread has a decoder, and frames that follow one another."""
        parts = [part for part in np.array_split(np.arange(len(indices)), threads) if len(part)]
        if len(parts) == 1:
            self._read_part(self._decoder, frames, indices)
            return

        def read(part: np.ndarray) -> None:
            where = slice(int(part[0]), int(part[-1]) + 1)
            self._read_part(self._open(), frames[where], indices[where])

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(read, parts))

    @staticmethod
    def _read_part(decoder: VideoDecoder, frames: np.ndarray, indices: list[int]) -> None:
        step = max(1, BATCH_BYTES // frames[0].nbytes)
        for start in range(0, len(indices), step):
            some = decoder.get_frames_at(indices[start : start + step]).data.numpy()
            if some.shape[1:] != frames.shape[1:]:
                raise MediaError("the video's frames are not all of one size")
            frames[start : start + step] = some

    def _open(self) -> VideoDecoder:
        return VideoDecoder(self._data, dimension_order="NHWC")


def open_video(data: bytes, limits: MediaLimits) -> tuple[Video, VideoFacts]:
    """A video that is within the limits.

    Raises:
        MediaError: it is no video, or larger than allowed.
        Exception: any error of torchcodec on a damaged one.
    """
    check_container(data, limits)
    video = Video(data)
    facts = video.facts()
    check_video(facts, limits)
    return video, facts
