"""Media of models that SGLang's in-tree encoder does not know, or not as a colocated server does,
prepared by the processor that its language servers use (`families`).

The counterpart of `preparing`, which leans on the in-tree encoder's own preprocessing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import msgspec
import torch
from PIL import Image

from sglang_epd.decoding import Decoding
from sglang_epd.device import DEVICE_ERRORS
from sglang_epd.encoder.tower import Prepared
from sglang_epd.errors import EpdError, MediaError, MediaTypeError
from sglang_epd.families.adapter import Adapter
from sglang_epd.families.expansion import EXPANSION
from sglang_epd.families.films import handed_on
from sglang_epd.modality import IMAGE, VIDEO
from sglang_epd.wire.messages import Layout, TensorSpec

logger = logging.getLogger(__name__)

# What a unit of cost is, where a family does not say how it cuts pictures: 14x14 pixels.
_VALUES_IN_A_PATCH = 3 * 14 * 14
# Sides that are made smaller may come to none: of so few pixels, or of so long a picture.
_NARROW = 28
_LONG = 200


class AdaptedPreparer:
    """Prepares pictures and videos for one model; safe to call from several threads at once.

    Args:
        adapter: proven.
        dtype: of the embeddings (torch name without the prefix).
        width: of the embeddings.
        towers: the modalities that the model's class has a tower for; fewer are taken where
            the adapter refuses one.
    """

    def __init__(
        self,
        adapter: Adapter,
        dtype: str,
        width: int,
        towers: Collection[str] = (IMAGE,),
    ) -> None:
        self._adapter = adapter
        self._dtype = dtype
        self._width = width
        self.modalities = tuple(
            name for name in (IMAGE, VIDEO) if name in towers and name not in adapter.refused
        )

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
            options: the item's own.

        Raises:
            EpdError: whatever `decoding` raises.
            MediaError: it cannot be decoded or preprocessed, or is larger than allowed.
            MediaTypeError: the model is not served with this modality.
        """
        if modality not in self.modalities:
            reason = self._adapter.refused.get(modality)
            because = f": {reason}" if reason else ""
            raise MediaTypeError(f"this encoder does not take {modality.lower()} input{because}")
        if modality == IMAGE:
            return self._prepare_picture(decoding.image(data, smart_rgb=self._adapter.turns(data)))
        return self._prepare_video(data, decoding, options or {})

    def _prepare_picture(self, picture: Image.Image) -> Prepared:
        try:
            return self.preprocess(IMAGE, picture)
        except DEVICE_ERRORS:
            raise
        except (RuntimeError, IndexError, ArithmeticError) as error:
            least, most = sorted(picture.size)
            if least >= _NARROW and most <= _LONG * least:
                raise
            logger.warning("SGLang cannot prepare a picture of %s: %s", picture.size, error)
            raise MediaError("it is too narrow for this model") from error

    def _prepare_video(
        self, data: bytes, decoding: Decoding, options: Mapping[str, Any]
    ) -> Prepared:
        film = decoding.video(data)
        try:
            with handed_on(film) as video:
                return self.preprocess(VIDEO, self._adapter.family.asked(video, options))
        except DEVICE_ERRORS:
            raise
        except (RuntimeError, IndexError) as error:
            logger.warning("SGLang cannot decode this video: %s", error)
            raise MediaError("the video is damaged or truncated") from error

    def preprocess(self, modality: str, medium: Any) -> Prepared:
        """Preprocess an RGB picture, or a video by its decoder (`Family.asked`).

        Raises:
            MediaError: it cannot be preprocessed.
        """
        try:
            seen = self._adapter.see(medium, modality)
        except EpdError:
            raise
        except (TypeError, ValueError) as error:
            raise MediaError(f"cannot be preprocessed: {error}") from error
        expansion = seen.part.expansion
        extra = {EXPANSION: [msgspec.to_builtins(expansion)]}
        grid = list(seen.part.grid) or [1, 1, expansion.rows]
        spec = TensorSpec(self._dtype, (expansion.rows, self._width))
        layout = Layout(modality, spec, [grid], extra)
        features = list(_tensors(item.feature for item in seen.items))
        patches = max(1, sum(part.numel() for part in features) // _VALUES_IN_A_PATCH)
        content = (seen.items[0].modality, seen.items)
        return Prepared(layout, patches, _group(modality, features), content)


def _group(modality: str, features: list[torch.Tensor]) -> Hashable:
    """Only items of one shape share a forward: no family has to fill any up for it."""
    return (modality, *(tuple(part.shape[1:]) for part in features[:1]))


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        else:
            yield torch.as_tensor(value)
