"""Sounds in a decoding child, read as SGLang's `utils.common.load_audio` reads them."""

from __future__ import annotations

import io
import math

import numpy as np

from sglang_epd.errors import MediaError, MediaTooLargeError
from sglang_epd.media import MediaLimits, check_audio

# Processor seconds of one sound.
CPU_S = 60
# Samples as they come from FFmpeg, put together, and in the file.
_SAMPLE_BYTES = 12
_SOUND_BYTES = 64 << 20


def needed_bytes(rate_hz: int, limits: MediaLimits) -> int:
    """How far a child may grow for a sound, beside the sound's file."""
    return _SOUND_BYTES + math.ceil(_SAMPLE_BYTES * rate_hz * limits.max_audio_s)


def decode(data: bytes, rate_hz: int, limits: MediaLimits) -> np.ndarray:
    """All samples of one channel, float32, that all channels are mixed into.

    Args:
        data: a WAV, FLAC, MP3 or Ogg file.
        rate_hz: that the samples are to have.
        limits: `max_bytes` and `max_audio_s` apply.

    Raises:
        MediaTooLargeError: it has more bytes, or lasts longer, than allowed.
        MediaError: it is not such a file, or holds nothing.
        Exception: any error of the libraries on a damaged one.
    """
    check_audio(data, limits)
    try:
        from torchcodec.decoders import AudioDecoder

        decoder = AudioDecoder(data, sample_rate=rate_hz, num_channels=1)
        if (decoder.metadata.duration_seconds or 0) > limits.max_audio_s:
            raise _too_long(limits)
        # No more of a sound that does not tell how long it is.
        played = decoder.get_samples_played_in_range(stop_seconds=limits.max_audio_s + 1)
        samples = played.data.squeeze(0).numpy()
    except (MemoryError, MediaTooLargeError):
        raise
    except Exception as error:
        if "memory" in str(error) or "bad_alloc" in str(error):
            raise
        samples = _by_libsndfile(data, rate_hz, limits)
    samples = np.ascontiguousarray(samples, np.float32)
    if not len(samples):
        raise MediaError("the audio holds no sound")
    if len(samples) > limits.max_audio_s * rate_hz:
        raise _too_long(limits)
    return samples


def _too_long(limits: MediaLimits) -> MediaTooLargeError:
    return MediaTooLargeError(f"audio lasts longer than {limits.max_audio_s:g} s, the limit")


def _by_libsndfile(data: bytes, rate_hz: int, limits: MediaLimits) -> np.ndarray:
    """As SGLang does where torchcodec fails: on a WAV file with much behind its samples."""
    import soundfile
    import torch
    import torchaudio

    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate = file.samplerate
        samples = file.read(math.ceil(rate * (limits.max_audio_s + 1)))
    if samples.ndim > 1:
        samples = np.mean(samples, axis=1)
    if rate == rate_hz:
        return samples
    whole = torch.from_numpy(samples).float().unsqueeze(0)
    resampled = torchaudio.functional.resample(whole, orig_freq=rate, new_freq=rate_hz)
    found: np.ndarray = resampled.squeeze(0).numpy()
    return found
