"""What encoders do as SGLang's server that does everything, where SGLang's encoder does not."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from sglang_epd.encoder.model.one_server import follow_one_server, seconds_per_grid


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


def test_time_passes_as_fast_as_the_processors_default_says() -> None:
    encoder = preprocessor(None)
    assert seconds_per_grid(encoder, "qwen2_5_vl") == 2 / 24
    assert seconds_per_grid(encoder, "qwen3_omni_moe") == 2.0


def test_qwen3_omnis_default_rate_is_still_the_one_we_know() -> None:
    import transformers

    source = inspect.getsource(transformers.Qwen3OmniMoeProcessor.__call__)
    assert 'output_kwargs["videos_kwargs"].get("fps", 1.0)' in source
