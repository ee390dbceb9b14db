"""What of preparing needs no model; the rest runs in test/integration."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import torch

from packages import sglang_module
from sglang_epd.device import DEVICE_ERRORS
from sglang_epd.encoder.model.engine import preparing_threads
from sglang_epd.encoder.model.preparing import (
    Preparer,
    _group,
    follow_one_server,
    seconds_per_grid,
)
from sglang_epd.errors import ConfigError, MediaError
from sglang_epd.families import FOLLOWED


def test_clips_of_one_padded_length_share_a_forward():
    short, long = torch.zeros(1, 128, 300), torch.zeros(1, 128, 3000)
    assert _group("AUDIO", short) == _group("AUDIO", torch.zeros(2, 128, 300))
    assert _group("AUDIO", short) != _group("AUDIO", long)


def test_patches_share_a_forward_whatever_their_number():
    assert _group("IMAGE", torch.zeros(4, 1176)) == _group("IMAGE", torch.zeros(16, 1176))
    assert _group("IMAGE", torch.zeros(4, 1176)) != _group("VIDEO", torch.zeros(4, 1176))


@pytest.mark.parametrize(
    ("told", "device", "cores", "threads", "team"),
    [
        (None, "cpu", 64, 4, 64),
        (None, "cuda", 64, 8, 8),
        (None, "cuda", 6, 6, 1),
        (None, "cuda", 2, 4, 1),
        ("1", "cuda", 64, 1, 64),
        ("24", "cpu", 2, 24, 64),
    ],
)
def test_how_many_items_are_prepared_side_by_side_and_how(
    monkeypatch, told, device, cores, threads, team
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.delenv("SGLANG_ENCODER_PREPROC_WORKERS", raising=False)
    if told is not None:
        monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", told)
    assert preparing_threads(device, cores) == (threads, team)


def test_no_threads_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("SGLANG_ENCODER_PREPROC_WORKERS", "0")
    with pytest.raises(ConfigError, match="SGLANG_ENCODER_PREPROC_WORKERS=0"):
        preparing_threads("cuda", 8)


def preprocessor(name: str | None) -> SimpleNamespace:
    import transformers

    whole = name and getattr(transformers, name)
    return SimpleNamespace(
        audio_processor=whole and whole.__new__(whole),
        video_processor=transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        vision_config={"audio": {}},
    )


def test_frames_have_the_size_that_the_whole_models_processor_asks_for() -> None:
    encoder = preprocessor("Qwen3OmniMoeProcessor")
    follow_one_server(encoder, "qwen3_omni_moe")
    size = encoder.video_processor.size
    assert (size.shortest_edge, size.longest_edge) == (128 * 32 * 32, 768 * 32 * 32)


@pytest.mark.parametrize("whole", [None, "Qwen2AudioProcessor"])
def test_frames_keep_the_checkpoints_size_where_it_asks_for_none(whole: str | None) -> None:
    encoder = preprocessor(whole)
    before = encoder.video_processor.size
    follow_one_server(encoder, "qwen2_5_vl")
    assert encoder.video_processor.size is before


def test_clips_are_cut_to_what_the_tower_takes() -> None:
    encoder = preprocessor("Qwen2AudioProcessor")
    follow_one_server(encoder, "qwen2_audio")
    assert encoder.vision_config["audio"]["truncation"]


def test_options_are_found_where_one_server_looks_for_them() -> None:
    """SGLang's encoder looks elsewhere, and has defaults of its own for videos."""
    sglang_module("multimodal.processors.qwen_vl")
    encoder = preprocessor(None)
    encoder.vision_config = {"image": {}, "video": {"fps": 2.0, "max_frames": 768}, "audio": {}}
    options = {"image": {"max_pixels": 50176}, "video": {"fps": 1.0}, "vision_config": {}}
    follow_one_server(encoder, "qwen2_5_vl", options)
    assert encoder.vision_config == {
        "image": {"max_pixels": 50176},
        "video": {"fps": 1.0, "max_frames": 768},
        "audio": {},
    }
    follow_one_server(encoder, "qwen2_5_vl", {"video": {"nframes": 16}})
    assert encoder.vision_config["video"] == {"max_frames": 768, "nframes": 16}, "both are refused"


def test_options_of_videos_that_do_not_choose_frames_reach_the_processor() -> None:
    sglang_module("multimodal.processors.qwen_vl")
    encoder = preprocessor(None)
    encoder.vision_config = {"image": {}, "video": {"fps": 2.0}, "audio": {}}

    async def read(items: object) -> tuple[object, dict[str, object]]:
        return items, {"do_sample_frames": False}

    encoder._flatten_and_load_videos = read
    follow_one_server(encoder, "qwen3_vl", {"video": {"fps": 1.0, "size": {"longest_edge": 1}}})
    told = asyncio.run(encoder._flatten_and_load_videos("videos"))
    assert told == ("videos", {"size": {"longest_edge": 1}, "do_sample_frames": False})


def test_time_passes_as_fast_as_the_processors_default_says() -> None:
    encoder = preprocessor(None)
    assert seconds_per_grid(encoder, "qwen2_5_vl") == 2 / 24
    assert seconds_per_grid(encoder, "qwen3_omni_moe") == 2.0


def test_qwen3_omnis_default_rate_is_still_the_one_we_know() -> None:
    import transformers

    source = inspect.getsource(transformers.Qwen3OmniMoeProcessor.__call__)
    assert 'output_kwargs["videos_kwargs"].get("fps", 1.0)' in source


def test_options_that_are_no_object_are_the_requests_error() -> None:
    preparer = Preparer.__new__(Preparer)
    preparer._followed = FOLLOWED["MiniMaxM3SparseForConditionalGeneration"]
    with pytest.raises(MediaError, match="preprocess_kwargs is no object"):
        preparer._with({"preprocess_kwargs": "4"}, "VIDEO", object())
    asked = preparer._with({"fps": 2.0, "cache_salt": "mine", "video": "another"}, "VIDEO", "one")
    assert asked.content == {"video": "one", "fps": 2.0}
    assert preparer._with({"cache_salt": "mine"}, "VIDEO", "one").content == "one"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("Could not push packet to decoder: Invalid data"), MediaError),
        *((kind("CUDA error"), kind) for kind in DEVICE_ERRORS),
    ],
)
def test_a_device_that_fails_is_not_the_files_fault(error, told):
    async def fail(*_arguments):
        raise error

    sglang_module("managers.schedule_batch")
    preparer = Preparer.__new__(Preparer)
    preparer._preprocessor = SimpleNamespace(process_mm_items=fail)
    preparer._refused_by_sglang = KeyError
    with pytest.raises(told, match=r"video is damaged or truncated|CUDA error"):
        preparer.preprocess("VIDEO", None)
