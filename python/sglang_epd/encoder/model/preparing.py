"""An item's bytes into what the tower runs: decoding within bounds, then SGLang's own
preprocessing, by modality.

Blocking: the engine calls it in its worker threads. Leans on
`disaggregation.encoder.server.MMEncoder` (item building, embedding widths), on its
`EncoderPreprocessor` (`process_mm_items`, `vision_config`, `model_audio_sr`,
`_load_single_item`) and on `multimodal.processors.qwen_vl.smart_nframes`. Media are
decoded apart (`decoding`), into the frames and samples that SGLang would make of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Hashable
from typing import Any

import torch
from PIL import Image

from sglang_epd.decoding import Decoding, Film
from sglang_epd.encoder.model.one_server import (
    Loaded,
    follow_one_server,
    seconds_per_grid,
    take_loaded,
)
from sglang_epd.encoder.model.videos import can_be_read
from sglang_epd.encoder.tower import Prepared
from sglang_epd.errors import EpdError, MediaError, MediaTypeError
from sglang_epd.families.films import apart
from sglang_epd.media import MediaLimits, check_frames_read
from sglang_epd.modality import AUDIO, IMAGE, MODALITIES, VIDEO
from sglang_epd.wire.messages import Layout, TensorSpec

logger = logging.getLogger(__name__)

# Models whose prompts spell each frame's time out, and whose rotary positions follow it.
_SPELLS_TIMESTAMPS = "video_timestamps"
_SECONDS_PER_GRID = "second_per_grid_ts"


class Preparer:
    """Prepares items for one model; safe to call from several threads at once.

    Args:
        encoder: SGLang's `MMEncoder`.
        dtype: of the embeddings (torch name without the prefix).
        limits: bounds on decoding.
    """

    def __init__(self, encoder: Any, dtype: str, limits: MediaLimits) -> None:
        from sglang.srt.disaggregation.encoder import preprocessor, server
        from sglang.srt.multimodal.processors.qwen_vl import smart_nframes

        self._encoder = encoder
        self._preprocessor = encoder.preprocessor
        self._refused_by_sglang = server.MMError
        self._feature_of = server._get_mm_feature
        self._to_tensor = preprocessor._convert
        self._frames_read = smart_nframes
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
            and (name != VIDEO or can_be_read())
        )
        if encoder.model_type == "qwen2_audio":
            # SGLang's table has the audio encoder's own width, before the projector.
            self._widths[AUDIO] = encoder.model_config.hidden_size
        follow_one_server(self._preprocessor, encoder.model_type)
        take_loaded(self._preprocessor)
        self._seconds_per_grid = seconds_per_grid(self._preprocessor, encoder.model_type)

    def prepare(self, modality: str, data: bytes, decoding: Decoding) -> Prepared:
        """Decode and preprocess one item.

        Raises:
            EpdError: whatever `decoding` raises.
            MediaError: it cannot be decoded or preprocessed, or is larger than allowed.
            MediaTypeError: the model does not take this modality.
        """
        if modality not in self.modalities:
            raise MediaTypeError(f"this encoder does not take {modality.lower()} input")
        if modality == IMAGE:
            return self.prepare_image(decoding.image(data))
        if modality == VIDEO:
            film = decoding.video(data)
            self._check_video(film)
            return self._preprocess(modality, Loaded(apart(film)))
        return self._preprocess(
            modality, Loaded(decoding.sound(data, self._preprocessor.model_audio_sr))
        )

    def prepare_image(self, image: Image.Image) -> Prepared:
        """Preprocess a picture that is decoded already (RGB).

        Raises:
            MediaError: it cannot be preprocessed.
        """
        return self._preprocess(IMAGE, image)

    def _check_video(self, film: Film) -> None:
        facts = film.facts
        config = self._preprocessor.vision_config.get("video", {})
        try:
            count = self._frames_read(config, facts.frames, facts.frames_per_second)
        except ValueError as error:
            raise MediaError(
                f"video of {facts.frames} frames is too short for this model"
            ) from error
        check_frames_read(facts, count, self._limits)

    def _preprocess(self, modality: str, media: Any) -> Prepared:
        sglang_modality = MODALITIES[modality].sglang
        work = self._preprocessor.process_mm_items([media], sglang_modality)
        try:
            # A loop of this thread's own: SGLang decodes and resizes videos on the loop
            # that it is awaited on, and must not do so on the one that serves.
            result = asyncio.run(work)
        except EpdError:
            raise
        except (TypeError, ValueError) as error:
            raise MediaError(f"cannot be preprocessed: {error}") from error
        except (self._refused_by_sglang, RuntimeError, IndexError) as error:
            if modality == IMAGE:
                raise
            logger.warning("SGLang cannot decode this %s: %s", modality.lower(), error)
            raise MediaError(f"{modality.lower()} is damaged or truncated") from error
        feature = self._to_tensor(self._feature_of(result.mm_inputs, sglang_modality))
        count = len(result.grid_thw)
        model_items = self._encoder._build_model_mm_items(
            feature, result, list(range(count)), sglang_modality
        )
        shape = (sum(result.token_counts), self._widths[modality])
        grid = torch.as_tensor(result.grid_thw).reshape(count, -1).tolist()
        layout = Layout(modality, TensorSpec(self._dtype, shape), grid, self._extra(result, count))
        patches = sum(math.prod(row) for row in grid)
        group = _group(modality, feature)
        return Prepared(layout, patches, group, (sglang_modality, model_items))

    def _extra(self, result: Any, count: int) -> dict[str, Any]:
        """What the language server's processor asks for beside the grid, one entry a row."""
        extra: dict[str, Any] = {}
        timestamps = result.mm_inputs.get(_SPELLS_TIMESTAMPS)
        if timestamps is not None:
            extra[_SPELLS_TIMESTAMPS] = [[float(time) for time in row] for row in timestamps]
        if result.mm_inputs.get(_SECONDS_PER_GRID) is not None:
            # Not the encoder's figure, which is of the frames asked for.
            extra[_SECONDS_PER_GRID] = [self._seconds_per_grid] * count
        return extra


def _group(modality: str, feature: torch.Tensor) -> Hashable:
    """Pictures and videos are rows of patches; audio clips are padded to some length."""
    return modality if modality != AUDIO else (modality, *feature.shape[1:])
