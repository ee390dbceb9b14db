"""`/v1/audio/transcriptions`: recordings are looked over before SGLang reads them.

SGLang takes a recording's length in the server's own process. Where its header cannot be read it
decodes all of it there, without a bound, and it decodes what is longer than a model's clip, to
cut it: two megabytes of FLAC are a day of silence and ten gigabytes of samples. A model without an
adapter of its own is given Whisper's, whose clips are short, so a server of pictures decodes too.
Here recordings are read on encoders.

Leans on `entrypoints.openai.serving_transcription.OpenAIServingTranscription`:
`create_transcription(audio_data, ...)`, which takes the length with `soundfile.info` first, its
`_adapter` with `max_audio_clip_s`, `tokenizer_manager` and `create_error_response(message)`.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any

from sglang_epd.errors import MediaError
from sglang_epd.media import MediaLimits, check_audio
from sglang_epd.seams import decode


async def create(original: Any, serving: Any, audio_data: bytes, *args: Any, **options: Any) -> Any:
    """Around `create_transcription`, on language servers, and decode servers that lay prompts out
    without their media."""
    from sglang.srt.runtime_context import get_mm

    manager = serving.tokenizer_manager
    # Only a language server has one.
    if getattr(manager, "mm_receiver", None) is None and not decode.lays_out_prompts(manager):
        return await original(serving, audio_data, *args, **options)
    if serving._adapter.max_audio_clip_s is not None:
        return serving.create_error_response("this model transcribes no recordings here")
    limits = MediaLimits.of(get_mm())
    try:
        check_audio(audio_data, limits)
        await asyncio.to_thread(_read_header, audio_data)
    except MediaError as error:
        return serving.create_error_response(error.message, status_code=error.status)
    return await original(serving, audio_data, *args, **options)


def _read_header(recording: bytes) -> None:
    """As SGLang does, which decodes what this cannot read.

    Raises:
        MediaError: it cannot.
    """
    import soundfile

    try:
        soundfile.info(io.BytesIO(recording))
    except soundfile.LibsndfileError:
        raise MediaError("the recording's header cannot be read") from None
