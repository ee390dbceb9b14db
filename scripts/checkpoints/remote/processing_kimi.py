"""The processors of a tiny Kimi, as its checkpoint carries them.

Those of Kimi-VL and Kimi-K2.5 are published as code beside the weights. These were written
for the tests, to the calls that SGLang makes of them: sizes that a picture already has are
kept, and its lower and right edges filled up to whole embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchvision.transforms.functional import pil_to_tensor
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

_PLACEHOLDER = "<|media_pad|>"


class KimiImageProcessor(BaseImageProcessor):
    """Pictures as patches, float32 [patches, 3, size, size].

    Args:
        patch_size: of a patch's side, in pixels.
        merge_kernel_size: patches on a side of one embedding.
        patch_limit: of one picture; larger ones are made smaller.
        image_mean, image_std: of each channel.
        grids: `image_grid_hws` with [height, width] of each picture, or `grid_thws` with
            [1, height, width], both in patches.
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self,
        *,
        patch_size: int = 14,
        merge_kernel_size: int = 2,
        patch_limit: int = 4096,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        grids: str = "image_grid_hws",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.merge_kernel_size = merge_kernel_size
        self.patch_limit = patch_limit
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.grids = grids

    @property
    def media_proc_cfg(self) -> dict[str, Any]:
        """The names that SGLang's wrapper of Kimi-K2.5's processor reads."""
        return {
            "patch_size": self.patch_size,
            "merge_kernel_size": self.merge_kernel_size,
            "in_patch_limit": self.patch_limit,
            "patch_limit_on_one_side": 512,
            "image_mean": self.image_mean,
            "image_std": self.image_std,
        }

    def media_tokens_calculator(self, media: Mapping[str, Image]) -> int:
        """Embeddings of one picture."""
        rows, columns = self._grid(media["image"])
        return rows * columns // self.merge_kernel_size**2

    def preprocess(self, images: Any, return_tensors: str = "pt", **kwargs: Any) -> BatchFeature:
        """Of pictures, or of dictionaries that hold one each under `image`."""
        if not isinstance(images, (list, tuple)):
            images = [images]
        pictures = [one["image"] if isinstance(one, dict) else one for one in images]
        grids = [list(self._grid(picture)) for picture in pictures]
        if self.grids == "grid_thws":
            grids = [[1, *grid] for grid in grids]
        patches = torch.cat([self._patches(picture) for picture in pictures])
        return BatchFeature({"pixel_values": patches, self.grids: torch.tensor(grids)})

    def _size(self, picture: Image) -> tuple[int, int]:
        width, height = picture.size
        area = (width // self.patch_size) * (height // self.patch_size)
        scale = min(1.0, (self.patch_limit / max(area, 1)) ** 0.5)
        return max(1, int(width * scale)), max(1, int(height * scale))

    def _grid(self, picture: Image) -> tuple[int, int]:
        width, height = self._size(picture)
        side = self.patch_size * self.merge_kernel_size
        rows, columns = (-(-length // side) for length in (height, width))
        return rows * self.merge_kernel_size, columns * self.merge_kernel_size

    def _patches(self, picture: Image) -> torch.Tensor:
        rows, columns = self._grid(picture)
        side = self.patch_size
        pixels = pil_to_tensor(picture.convert("RGB").resize(self._size(picture))) / 255
        mean, std = (torch.tensor(of).view(3, 1, 1) for of in (self.image_mean, self.image_std))
        whole = torch.zeros(3, rows * side, columns * side)
        whole[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        whole = (whole - mean) / std
        split = whole.view(3, rows, side, columns, side)
        return split.permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)


class KimiProcessor(ProcessorMixin):
    """Text and pictures; each placeholder of a picture becomes as many as it has embeddings.

    A Kimi-K2.5 is given its pictures as `medias`, with a prompt in which SGLang has repeated
    the placeholders already.
    """

    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @property
    def media_processor(self) -> Any:
        return self.image_processor

    def __call__(
        self,
        text: str | Sequence[str],
        images: Sequence[Image] | None = None,
        medias: Sequence[Mapping[str, Image]] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        texts = [text] if isinstance(text, str) else list(text)
        pictures: Mapping[str, Any] = {}
        if images or medias:
            pictures = self.image_processor.preprocess(images or medias)
        if images:
            counts = [self.image_processor.media_tokens_calculator({"image": i}) for i in images]
            start, *rest = texts[0].split(_PLACEHOLDER)
            for count, part in zip(counts, rest, strict=True):
                start += _PLACEHOLDER * count + part
            texts = [start]
        return BatchFeature({**self.tokenizer(texts, return_tensors="pt"), **pictures})
