"""Pictures of models that SGLang's in-tree encoder does not know, prepared by the
processor that its language servers use (`families`).

The counterpart of `preparing`, which leans on the in-tree encoder's own preprocessing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from PIL import Image

from sglang_epd.encoder.tower import Prepared
from sglang_epd.errors import EpdError, MediaError, MediaTypeError
from sglang_epd.families.adapter import Adapter
from sglang_epd.families.expansion import EXPANSION
from sglang_epd.media import MediaLimits, decode_image
from sglang_epd.wire import Layout, TensorSpec

# What a unit of cost is, where a family does not say how it cuts pictures: 14x14 pixels.
_VALUES_IN_A_PATCH = 3 * 14 * 14


class PicturePreparer:
    """Prepares pictures for one model; safe to call from several threads at once.

    Args:
        adapter: proven.
        dtype: of the embeddings (torch name without the prefix).
        width: of the embeddings.
        limits: bounds on decoding.
    """

    modalities = ("IMAGE",)

    def __init__(self, adapter: Adapter, dtype: str, width: int, limits: MediaLimits) -> None:
        self._adapter = adapter
        self._dtype = dtype
        self._width = width
        self._limits = limits

    def prepare(self, modality: str, data: bytes) -> Prepared:
        """Decode and preprocess one item.

        Raises:
            MediaError: it cannot be decoded or preprocessed, or is larger than allowed.
            MediaTypeError: it is no picture.
        """
        if modality not in self.modalities:
            raise MediaTypeError(f"this encoder does not take {modality.lower()} input")
        return self.prepare_image(decode_image(data, self._limits))

    def prepare_image(self, image: Image.Image) -> Prepared:
        """Preprocess a picture that is decoded already (RGB).

        Raises:
            MediaError: it cannot be preprocessed.
        """
        try:
            seen = self._adapter.see(image)
        except EpdError:
            raise
        except (TypeError, ValueError) as error:
            raise MediaError(f"cannot be preprocessed: {error}") from error
        shape = (seen.expansion.rows, self._width)
        extra = {
            EXPANSION: [
                {
                    "text": seen.expansion.text,
                    "token": seen.expansion.token,
                    "runs": seen.expansion.runs,
                }
            ]
        }
        grid = seen.grid or [1, 1, seen.expansion.rows]
        layout = Layout("IMAGE", TensorSpec(self._dtype, shape), [grid], extra)
        features = list(_tensors(item.feature for item in seen.items))
        patches = max(1, sum(part.numel() for part in features) // _VALUES_IN_A_PATCH)
        content = (seen.items[0].modality, seen.items)
        return Prepared(layout, patches, _group(features), content)


def _group(features: list[torch.Tensor]) -> Hashable:
    """Only pictures of one shape share a forward: no family has to fill any up for it."""
    return ("IMAGE", *(tuple(part.shape[1:]) for part in features[:1]))


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        else:
            yield torch.as_tensor(value)
