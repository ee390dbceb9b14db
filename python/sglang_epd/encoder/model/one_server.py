"""Where SGLang's encoder prepares media otherwise than its server that does everything,
whose answers are the measure.

Leans on `disaggregation.encoder.preprocessor.EncoderPreprocessor` (its processors,
`vision_config` and `_load_single_item`), and on `transformers`' processors of whole models.
"""

from __future__ import annotations

from typing import Any

# Frames a second that a whole model's processor takes for its default, where that is not
# the one of `VideoMetadata`.
_FRAMES_PER_SECOND = {"qwen3_omni_moe": 1.0}


def follow_one_server(preprocessor: Any, model_type: str) -> None:
    """Change what differs.

    Args:
        preprocessor: SGLang's, of an encoder.
        model_type: of the model's configuration.
    """
    if model_type == "qwen2_audio":
        # Its tower takes 30 s, no more and no less: one server cuts longer clips, and the
        # encoder would fail on them.
        preprocessor.vision_config["audio"]["truncation"] = True
    size = _video_size(preprocessor.audio_processor)
    if size is not None:
        from transformers.image_utils import SizeDict  # two seconds, with torchvision

        # One server asks the whole model's processor, which has a size for frames of its
        # own; the encoder asks the video processor alone.
        preprocessor.video_processor.size = SizeDict(**size)


class Loaded:
    """Media that need not be loaded any more."""

    def __init__(self, content: Any) -> None:
        self.content = content


def take_loaded(preprocessor: Any) -> None:
    """Have a preprocessor hand `Loaded` media on."""
    load = preprocessor._load_single_item

    def hand_on(data: Any, *args: Any, **options: Any) -> Any:
        return data.content if isinstance(data, Loaded) else load(data, *args, **options)

    preprocessor._load_single_item = hand_on


def seconds_per_grid(preprocessor: Any, model_type: str) -> float:
    """How much of a video one row of its grid is, for rotary positions.

    One server hands frames to the processor without their rate, which then takes its
    default for it.
    """
    from transformers.video_utils import VideoMetadata

    patch: int = getattr(preprocessor.video_processor, "temporal_patch_size", 2)
    return patch / (_FRAMES_PER_SECOND.get(model_type) or VideoMetadata(0).sampled_fps)


def _video_size(whole: Any) -> dict[str, int] | None:
    """What the processor of a whole model gives its video processor for its `size`.

    Args:
        whole: SGLang's encoder has it of models that hear, else None.
    """
    kwargs = getattr(whole, "valid_processor_kwargs", None)
    defaults: dict[str, Any] = getattr(kwargs, "_defaults", {})
    return defaults.get("videos_kwargs", {}).get("size")
