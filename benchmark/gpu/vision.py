"""Vision towers of `transformers` in the shapes of released models, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

_FLASH = "torch_flash_varlen"


@dataclass(frozen=True)
class Shape:
    """A tower: its class's options, and how its pictures are cut."""

    family: str
    options: dict[str, Any]
    patch_size: int
    pixels: tuple[int, int] = (65_536, 16_777_216)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def width(self) -> int:
        """Of an embedding's row: the tower's output and what goes past the first layers."""
        taps: Sequence[int] = self.options.get("deepstack_visual_indexes", ())
        width: int = self.options["out_hidden_size"] * (1 + len(taps))
        return width


_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SHAPES = {
    "qwen3-vl-8b": Shape(
        "qwen3_vl",
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        patch_size=16,
    ),
    "qwen2.5-vl-7b": Shape(
        "qwen2_5_vl",
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        patch_size=14,
        pixels=(3136, 12_845_056),
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    ),
    "tiny-qwen3-vl": Shape(
        "qwen3_vl",
        {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 16,
            "deepstack_visual_indexes": [0],
        },
        patch_size=16,
    ),
    "tiny-qwen2.5-vl": Shape(
        "qwen2_5_vl",
        {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        patch_size=14,
        pixels=(3136, 12_845_056),
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    ),
}


class Vision:
    """A tower and its picture processor.

    Args:
        shape: of the tower.
        device: "cuda" or "cpu".

    Attributes:
        pins: whether patches are prepared into pinned memory.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        from transformers import Qwen2VLImageProcessor
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
        from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

        self.attention = _attention(device)
        self.shape = shape
        self.pins = False
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        kind: Any
        if shape.family == "qwen3_vl":
            kind = qwen3.Qwen3VLVisionModel
            config = qwen3.Qwen3VLVisionConfig(**shape.options)
        else:
            kind = qwen2_5.Qwen2_5_VisionTransformerPretrainedModel
            config = qwen2_5.Qwen2_5_VLVisionConfig(**shape.options)
        config._attn_implementation = "sdpa"
        torch.manual_seed(1)
        with torch.device(device):
            self.module = kind._from_config(config, dtype=self.dtype).eval()
        # Afterwards: transformers would look for a package of this name.
        self.module.config._attn_implementation = self.attention
        self.processor = Qwen2VLImageProcessor(
            patch_size=shape.patch_size,
            temporal_patch_size=2,
            merge_size=2,
            image_mean=list(shape.mean),
            image_std=list(shape.std),
            size=dict(zip(("shortest_edge", "longest_edge"), shape.pixels, strict=True)),
        )

    def prepare(self, picture: Image.Image) -> tuple[torch.Tensor, list[list[int]]]:
        """Patches [patches, values] in float32 on the host, and the grid, one row."""
        made = self.processor(images=[picture], return_tensors="pt")
        pixels = made["pixel_values"]
        return pixels.pin_memory() if self.pins else pixels, made["image_grid_thw"].tolist()

    def run(
        self, features: Sequence[torch.Tensor], grids: Sequence[Sequence[Sequence[int]]]
    ) -> torch.Tensor:
        """Embeddings [tokens, width] of several pictures, one after the other.

        What the grids decide is computed on the host, as SGLang does: the tower never waits
        for the device.
        """
        with torch.inference_mode():
            pixels = torch.empty(
                (sum(len(one) for one in features), features[0].shape[1]),
                device=self.device,
                dtype=self.dtype,
            )
            at = 0
            for one in features:
                pixels[at : at + len(one)].copy_(one, non_blocking=True)
                at += len(one)
            grid = torch.tensor([row for rows in grids for row in rows])
            made = self.module(pixels, grid_thw=grid, **self._places(grid))
            taps = getattr(made, "deepstack_features", None) or []
            together: torch.Tensor = torch.cat([made.pooler_output, *taps], dim=1)
            return together

    def _places(self, grid: torch.Tensor) -> dict[str, Any]:
        """What the tower would make of the grids, waiting for the device at each step."""
        from transformers import vision_utils

        config = self.module.config
        merge = self.module.spatial_merge_size
        device = {"device": self.device, "non_blocking": True}
        segments = vision_utils.get_vision_cu_seqlens(grid)
        places = {
            "position_ids": vision_utils.get_vision_position_ids(grid, merge).to(**device),
            "cu_seqlens": segments.to(**device),
            "max_seqlen": int(segments.diff().max()),
        }
        if self.shape.family == "qwen3_vl":
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=self.module.num_grid_per_side,
                mode=self.module.interpolation_mode,
                align_corners=self.module.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            places |= {
                "interp_indices": indices.to(**device),
                "interp_weights": weights.to(**device),
            }
        else:
            order, windows = vision_utils.get_vision_window_index(
                grid,
                spatial_merge_size=merge,
                window_size=config.window_size,
                patch_size=config.patch_size,
            )
            places |= {
                "window_index": order.to(**device),
                "cu_window_seqlens": windows.to(**device),
                "max_window_seqlen": int(windows.diff().max()),
            }
        return places


def _attention(device: str) -> str:
    """The kind of attention that works here.

    Each picture attends to itself alone. Torch's own flash attention takes all pictures of a
    batch in one kernel; "sdpa" takes one after the other, and waits for the device in each
    layer.
    """
    from transformers import AttentionInterface

    if device == "cpu":
        return "sdpa"
    AttentionInterface.register(_FLASH, _flash)
    heads = torch.zeros(1, 16, 128, 72, device=device, dtype=torch.bfloat16)
    segments = torch.tensor([0, 64, 128], device=device, dtype=torch.int32)
    try:
        _flash(None, heads, heads, heads, scaling=1.0, cu_seq_lens_q=segments, max_length_q=64)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"no flash attention in this torch, sdpa in its place: {error}", flush=True)
        return "sdpa"
    return _FLASH


def _flash(
    _module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each picture: [1, heads, patches, size] to [1, patches, heads, size]."""
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    bounds = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
    made = torch.ops.aten._flash_attention_forward(*rows, *bounds, 0.0, False, False, scale=scaling)
    return made[0].unsqueeze(0), None
