"""What children decode is what SGLang itself makes of a file, and its encoder takes it so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clips
from sglang_epd.decoding import Decoders
from sglang_epd.encoder.model.preparing import Loaded, take_loaded
from sglang_epd.families.films import handed_on
from sglang_epd.media import MediaLimits
from sglang_epd.modality import AUDIO

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders(MediaLimits(), 1 << 30, 2)
    yield decoders
    decoders.close()


@pytest.mark.parametrize("container", ["mp4", "webm"])
@pytest.mark.parametrize("indices", [[0], [0, 3, 7, 11, 23], list(range(24)), [5, 2, 2]])
def test_frames_are_sglangs(decoders: Decoders, container: str, indices: list[int]) -> None:
    from sglang.srt.utils.common import load_video
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    data = clips.video(container=container)
    theirs = VideoDecoderWrapper(data)
    with decoders.begin() as item:
        ours = handed_on(item.video(data))
        assert isinstance(ours, VideoDecoderWrapper)
        assert load_video(ours) is ours
        assert len(ours) == len(theirs)
        assert ours.avg_fps == theirs.avg_fps
        assert ours.frame_shape == theirs.frame_shape
        read = ours.get_frames_as_tensor(indices)
        assert read.dtype == torch.uint8
        assert torch.equal(read, theirs.get_frames_as_tensor(indices))
        assert np.array_equal(ours.get_frames_at(indices), theirs.get_frames_at(indices))
        assert np.array_equal(ours[-1], theirs[-1])
        ours.close()


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate_hz", [16_000, 44_100])
def test_samples_are_sglangs(decoders: Decoders, container: str, rate_hz: int) -> None:
    from sglang.srt.utils.common import load_audio

    data = clips.audio(container=container, rate_hz=rate_hz)
    with decoders.begin() as item:
        ours = item.array(AUDIO, data, 16_000)
        theirs = load_audio(data, 16_000)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_what_torchcodec_refuses_is_read_as_sglang_reads_it(decoders, monkeypatch) -> None:
    """A WAV file with much behind its samples."""
    from sglang.srt.utils.common import load_audio

    from sglang_epd.decoding import sound

    data = clips.audio(rate_hz=44_100)
    monkeypatch.setattr("torchcodec.decoders.AudioDecoder", None)  # fails for both
    assert np.array_equal(sound.decode(data, 16_000, MediaLimits()), load_audio(data, 16_000))


def test_sglangs_encoder_hands_loaded_media_on() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from sglang.srt.disaggregation.encoder.preprocessor import EncoderPreprocessor
    from sglang.srt.managers.schedule_batch import Modality

    preprocessor = EncoderPreprocessor.__new__(EncoderPreprocessor)
    preprocessor.model_audio_sr = 16_000
    take_loaded(preprocessor)
    content = object()
    with ThreadPoolExecutor(1) as pool:
        preprocessor.io_executor = pool
        for modality in (Modality.VIDEO, Modality.AUDIO):
            (future,), _ = preprocessor._submit_data_loading_tasks([Loaded(content)], [modality])
            assert future.result() is content
            found = asyncio.run(
                preprocessor._flatten_and_load_data_by_modality([Loaded(content)], modality)
            )
            assert SimpleNamespace(found=found).found[0] is content
