"""SGLang's own handler of `/v1/audio/transcriptions`."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from sglang_epd.seams.decode import DecodePrompts

# SGLang's answers to errors are made with a class that FastAPI deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")


def recording(seconds: float, container: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(16_000 * seconds)), 16_000, format=container)
    return file.getvalue()


@pytest.fixture
def decoded():
    """What was decoded in the server's process."""
    return []


@pytest.fixture
def transcribe(sglang, flags, hooked, monkeypatch, decoded):
    """Have a recording transcribed; the status, and SGLang's request or the message."""
    module = sglang("entrypoints.openai.serving_transcription")
    hooked("OpenAIServingTranscription.create_transcription")

    def decode(data, *_args, **_options):
        decoded.append(data)
        raise ValueError

    monkeypatch.setattr(sglang("utils"), "load_audio", decode)
    monkeypatch.setattr(module, "split_audio_energy_aware", decode)

    def run(data: bytes, *, clip_s=None, ours=True, decodes=False):
        flags(mm={"allowed_media_domains": [], "media_url_max_file_size_mb": 64})
        serving = object.__new__(module.OpenAIServingTranscription)
        processor = SimpleNamespace()
        serving.tokenizer_manager = SimpleNamespace(mm_processor=processor)
        if decodes:
            prompts = object.__new__(DecodePrompts)
            processor.process_mm_data_async = prompts.process
        if ours and not decodes:
            serving.tokenizer_manager.mm_receiver = object()
        serving._adapter = SimpleNamespace(
            max_audio_clip_s=clip_s, supports_language_detection=False
        )

        async def handle(request, _http):
            return request

        serving.handle_request = handle
        asked = serving.create_transcription(
            audio_data=data,
            model="m",
            language=None,
            response_format="json",
            temperature=0.0,
            stream=False,
            raw_request=None,
        )
        answer = asyncio.run(asked)
        if hasattr(answer, "body"):
            return answer.status_code, json.loads(answer.body)["message"]
        return 200, answer

    return run


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_recording_goes_on_undecoded(transcribe, container, decodes):
    status, request = transcribe(recording(2.0, container), decodes=decodes)
    assert status == 200
    assert request.audio_duration_s == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("decodes", [True, False])
def test_what_sglang_would_decode_is_refused(transcribe, decoded, decodes):
    flac = recording(2.0)
    # The size of its first block of metadata.
    for bad in (flac[:30], b"\x00" * 100, b"", flac[:5] + b"\xff\xff\xff" + flac[8:]):
        status, message = transcribe(bad, decodes=decodes)
        assert status == 400
        assert any(word in message for word in ("header", "not an audio file", "empty"))
    status, message = transcribe(recording(40.0), clip_s=30.0, decodes=decodes)
    assert status == 400
    assert "no recordings here" in message
    assert not decoded


def test_other_servers_are_sglangs(transcribe, decoded):
    long, damaged = recording(40.0), recording(2.0)[:30]
    transcribe(long, clip_s=30.0, ours=False)
    transcribe(damaged, ours=False)
    assert decoded == [long, damaged]
