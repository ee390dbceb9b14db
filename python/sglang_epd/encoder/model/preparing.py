"""An item's bytes into what the tower runs: decoding within bounds, then SGLang's own
preprocessing, by modality.

Blocking: the engine calls it in its worker threads. Leans on
`disaggregation.encoder.server.MMEncoder` (item building, embedding widths), on its
`_build_mm_aux_data`, on MiMo-V2's `MiMoProcessor._load_video_for_encoder`, on its
`EncoderPreprocessor` (`process_mm_items`, `vision_config`, `model_audio_sr`,
`_load_single_item`, `_flatten_and_load_videos`) and its `EncoderPreprocessResult`, on
`multimodal.processors.qwen_vl` (`smart_nframes`, `is_cpu`, and
`QWEN_VIDEO_PREPROCESS_CONFIG_KEYS`), and on `transformers`' processors of whole models. Media are
decoded apart (`decoding`), into the frames and samples that SGLang would make of them.
Where SGLang's encoder prepares media otherwise than its server that does everything, the
latter's answers are the measure.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from sglang_epd.decoding import Decoding, Film
from sglang_epd.decoding.messages import Cut
from sglang_epd.device import DEVICE_ERRORS, Device
from sglang_epd.encoder.model.gpu_pixels import GpuPixels
from sglang_epd.encoder.model.patches import Patches, proven
from sglang_epd.encoder.tower import Prepared
from sglang_epd.errors import ConfigError, EpdError, MediaError, MediaTypeError
from sglang_epd.families import FOLLOWED
from sglang_epd.families.films import apart
from sglang_epd.media import MediaLimits, check_frames_read
from sglang_epd.modality import AUDIO, IMAGE, MODALITIES, VIDEO
from sglang_epd.wire.messages import Layout, TensorSpec

logger = logging.getLogger(__name__)

_SECONDS_PER_GRID = "second_per_grid_ts"
# Frames a second that a whole model's processor takes for its default, where that is not
# the one of `VideoMetadata`.
_FRAMES_PER_SECOND = {"qwen3_omni_moe": 1.0}


class Preparer:
    """Prepares items for one model; safe to call from several threads at once.

    Args:
        encoder: SGLang's `MMEncoder`.
        dtype: of the embeddings (torch name without the prefix).
        limits: bounds on decoding.
        device: of the tower.

    Attributes:
        patches: how its pictures are cut in decoding children; None where they are
            preprocessed in this process.

    Raises:
        ConfigError: pixels are to be made on the GPU, where this model's are not.
    """

    def __init__(self, encoder: Any, dtype: str, limits: MediaLimits, device: Device) -> None:
        from sglang.srt.disaggregation.encoder import preprocessor, server
        from sglang.srt.multimodal.processors import qwen_vl
        from sglang.srt.runtime_context import get_mm

        self._encoder = encoder
        self._preprocessor = encoder.preprocessor
        self._refused_by_sglang = server.MMError
        self._feature_of = server._get_mm_feature
        self._to_tensor = preprocessor._convert
        self._result = preprocessor.EncoderPreprocessResult
        self._beside = server._build_mm_aux_data
        self._frames_read = qwen_vl.smart_nframes
        # It would pin resized frames, which are processed where they are: torch keeps pinned
        # memory, in powers of two.
        qwen_vl.is_cpu = lambda: True
        self._dtype = dtype
        self._limits = limits
        self._widths = {
            name: encoder._embedding_dims[row.sglang] for name, row in MODALITIES.items()
        }
        target = getattr(encoder.model, "thinker", encoder.model)
        self.modalities = tuple(
            name
            for name, row in MODALITIES.items()
            if encoder.supports_modality(row.sglang)
            and hasattr(target, row.feature_method)
            and (name != VIDEO or (self._reads_videos() and videos_can_be_read()))
        )
        if encoder.model_type == "qwen2_audio":
            # SGLang's table has the audio encoder's own width, before the projector.
            self._widths[AUDIO] = encoder.model_config.hidden_size
        follow_one_server(self._preprocessor, encoder.model_type, get_mm().mm_process_config)
        take_loaded(self._preprocessor)
        self._followed = FOLLOWED.get(encoder.model_config.hf_config.architectures[0], ())
        self._hears_videos = encoder.model_type == "mimo_v2"
        if self._hears_videos:
            take_loaded_videos()
        self._gpu_pixels: GpuPixels | None = None
        if self._preprocessor.use_image_processor_gpu and encoder.device == "cuda":
            if self._preprocessor._model_preprocessor is not None:
                raise ConfigError(
                    "SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU is not served with "
                    f"{encoder.model_type}, which prepares its media itself; unset it"
                )
            self._gpu_pixels = GpuPixels(self._preprocessor, device, limits)
        self.patches: Patches | None = None
        if self._gpu_pixels is None and self._preprocessor._model_preprocessor is None:
            options = self._preprocessor.vision_config["image"]
            self.patches = proven(self._preprocessor.image_processor, options, device)
        self._seconds_per_grid = seconds_per_grid(self._preprocessor, encoder.model_type)

    def prepare(
        self,
        modality: str,
        data: bytes,
        decoding: Decoding,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Decode and preprocess one item.

        Args:
            data: the encoded media.
            decoding: of this item; the caller ends it when this has returned.
            options: the item's own; a model's preprocessing checks those that it follows.

        Raises:
            EpdError: whatever `decoding` raises.
            MediaError: it cannot be decoded or preprocessed, or is larger than allowed.
            MediaTypeError: the model does not take this modality.
        """
        if modality not in self.modalities:
            raise MediaTypeError(f"this encoder does not take {modality.lower()} input")
        if modality == IMAGE:
            pixels = None if self._gpu_pixels is None else self._gpu_pixels.decode(data)
            if pixels is not None:
                return self.preprocess(modality, Loaded(pixels))
            if self.patches is not None:
                return self._prepared(modality, self._cut(data, decoding, self.patches.cut))
            return self.preprocess(modality, self._with(options, modality, decoding.image(data)))
        if modality == VIDEO:
            film = decoding.video(data)
            if self._hears_videos and film.facts.sound:
                raise MediaError(
                    "this model hears the sound of a video, which an encoder cannot send: "
                    "send the video without sound"
                )
            self._check_video(film)
            return self.preprocess(modality, self._with(options, modality, apart(film)))
        rate_hz = self._preprocessor.model_audio_sr
        return self.preprocess(modality, Loaded(decoding.array(modality, data, rate_hz)))

    def _with(self, options: Mapping[str, Any] | None, modality: str, content: Any) -> Loaded:
        """Decoded media as SGLang's encoder hands them on: beside the options that are
        followed."""
        given = options or {}
        followed = {name: given[name] for name in self._followed if name in given}
        if not isinstance(followed.get("preprocess_kwargs", {}), Mapping):
            raise MediaError("preprocess_kwargs is no object")
        return Loaded({modality.lower(): content, **followed} if followed else content)

    def _reads_videos(self) -> bool:
        """Whether SGLang's encoder knows how the model reads videos."""
        known = "qwen" in self._encoder.model_type
        return known or self._preprocessor._model_preprocessor is not None

    def _check_video(self, film: Film) -> None:
        """Refuse a video before it is read, where it is known how many frames will be. (Other
        models choose them otherwise. Whatever is read is bounded as it is.)"""
        if "qwen" not in self._encoder.model_type:
            return
        facts = film.facts
        config = self._preprocessor.vision_config.get("video", {})
        try:
            count = self._frames_read(config, facts.frames, facts.frames_per_second)
        except ValueError as error:
            raise MediaError(
                f"video of {facts.frames} frames is too short for this model"
            ) from error
        check_frames_read(facts, count, self._limits)

    def preprocess(self, modality: str, media: Any) -> Prepared:
        """Preprocess media that are decoded already: an RGB picture, or `Loaded`.

        Raises:
            MediaError: they cannot be preprocessed.
        """
        sglang_modality = MODALITIES[modality].sglang
        work = self._preprocessor.process_mm_items([media], sglang_modality)
        try:
            # A loop of this thread's own: SGLang decodes and resizes videos on the loop
            # that it is awaited on, and must not do so on the one that serves.
            result = asyncio.run(work)
        except (EpdError, *DEVICE_ERRORS):
            raise
        except (TypeError, ValueError) as error:
            raise MediaError(f"cannot be preprocessed: {error}") from error
        except (self._refused_by_sglang, RuntimeError, IndexError) as error:
            if modality == IMAGE:
                raise
            logger.warning("SGLang cannot decode this %s: %s", modality.lower(), error)
            raise MediaError(f"{modality.lower()} is damaged or truncated") from error
        return self._prepared(modality, result)

    def _cut(self, data: bytes, decoding: Decoding, cut: Cut) -> Any:
        """What SGLang's preprocessor says of a picture, but for its patches."""
        patches, (down, across) = decoding.patches(data, cut)
        grid = torch.tensor([[1, down, across]])
        made = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": grid}
        tokens = down * across // cut.merge**2
        return self._result(mm_inputs=made, grid_thw=grid, token_counts=[tokens])

    def _prepared(self, modality: str, result: Any) -> Prepared:
        sglang_modality = MODALITIES[modality].sglang
        feature = self._to_tensor(self._feature_of(result.mm_inputs, sglang_modality))
        count = len(result.grid_thw)
        model_items = self._encoder._build_model_mm_items(
            feature, result, list(range(count)), sglang_modality
        )
        shape = (sum(result.token_counts), self._widths[modality])
        if not shape[0]:
            # A receiver takes no empty embedding.
            raise MediaError(f"{modality.lower()} is too short for this model: it has no token")
        grid = torch.as_tensor(result.grid_thw).reshape(count, -1).tolist()
        layout = Layout(modality, TensorSpec(self._dtype, shape), grid, self._extra(result, count))
        patches = sum(math.prod(row) for row in grid)
        group = _group(modality, feature)
        return Prepared(layout, patches, group, (sglang_modality, model_items))

    def _extra(self, result: Any, count: int) -> dict[str, Any]:
        """What the language server's processor asks for beside the grid: all that SGLang's own
        encoder sends."""
        made = self._beside(result.mm_inputs, self._encoder.model_type)
        extra = {name: _plain(value) for name, value in made.items() if value is not None}
        if _SECONDS_PER_GRID in extra:
            # Not the encoder's figure, which is of the frames asked for.
            extra[_SECONDS_PER_GRID] = [self._seconds_per_grid] * count
        return extra


def _plain(value: Any) -> Any:
    """Of numbers in tensors and lists, the same in lists."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _group(modality: str, feature: Any) -> Hashable:
    """Pictures and videos are rows of patches; audio clips are padded to some length, or each
    is an entry of a list."""
    padded = MODALITIES[modality].lengths and isinstance(feature, torch.Tensor)
    return (modality, *feature.shape[1:]) if padded else modality


def videos_can_be_read() -> bool:
    """Whether FFmpeg's libraries are there; a line of the log says where they are not."""
    from sglang.srt.utils import video_decoder

    if video_decoder._BACKEND != "torchcodec":
        logger.warning("torchcodec cannot be imported: this encoder takes no videos")
        return False
    from torchcodec._core import ffmpeg_major_version

    if ffmpeg_major_version is None:
        logger.warning("FFmpeg's libraries cannot be loaded: this encoder takes no videos")
    return ffmpeg_major_version is not None


def follow_one_server(
    preprocessor: Any, model_type: str, options: Mapping[str, Any] | None = None
) -> None:
    """Have an encoder's preprocessor do as a server that does everything.

    Args:
        preprocessor: SGLang's, of an encoder.
        model_type: of the model's configuration.
        options: the value of `--mm-process-config`.
    """
    for modality in MODALITIES:
        # SGLang's encoder looks for them below "vision_config" only.
        if given := (options or {}).get(modality.lower()):
            config = preprocessor.vision_config[modality.lower()]
            if "nframes" in given:
                # SGLang's default of the encoder alone; both together are refused.
                config.pop("fps", None)
            config.update(given)
    if "qwen" in model_type and (options or {}).get("video"):
        _give_video_options(preprocessor, (options or {})["video"])
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


def _give_video_options(preprocessor: Any, options: Mapping[str, Any]) -> None:
    """Have the video processor get what is not for the choice of frames, as one server's does: the
    encoder's gets none of it."""
    from sglang.srt.multimodal.processors.qwen_vl import QWEN_VIDEO_PREPROCESS_CONFIG_KEYS

    beyond = {k: options[k] for k in options if k not in QWEN_VIDEO_PREPROCESS_CONFIG_KEYS}
    if not beyond:
        return
    read = preprocessor._flatten_and_load_videos

    async def read_with_options(items: Any) -> tuple[Any, dict[str, Any]]:
        videos, told = await read(items)
        return videos, beyond | told

    preprocessor._flatten_and_load_videos = read_with_options


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


def take_loaded_videos() -> None:
    """Have MiMo-V2's own preprocessing, which opens files itself, take `Loaded` videos."""
    from sglang.srt.multimodal.processors import mimo_v2

    load = mimo_v2.MiMoProcessor._load_video_for_encoder

    def hand_on(processor: Any, video: Any) -> Any:
        if not isinstance(video, Loaded):
            return load(processor, video)
        options = processor.default_video_processor_kwargs
        # It looks for sound in the file, of which there is none.
        return b"", mimo_v2._decode_frames_and_timestamps(video.content, options)

    mimo_v2.MiMoProcessor._load_video_for_encoder = hand_on


def seconds_per_grid(preprocessor: Any, model_type: str) -> float:
    """How much of a video one row of its grid is, for rotary positions.

    One server hands frames to the processor without their rate, which then takes its
    default for it.

    Args:
        preprocessor: SGLang's, of an encoder.
        model_type: of the model's configuration.
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
