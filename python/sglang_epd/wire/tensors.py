"""Raw tensor frames: the bytes of a contiguous host tensor, nothing in between.

Torch takes seconds to import, so it is where there is a tensor: a process that only says
what a tensor is like starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import TensorSpec

if TYPE_CHECKING:
    import torch

# The dtypes of an embedding, and their bytes; a frame of any other dtype is refused.
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Describe `tensor`.

    Raises:
        ProtocolError: a dtype that no frame may have.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _ITEM_BYTES:
        raise ProtocolError(f"embeddings of dtype {tensor.dtype} cannot be sent")
    return TensorSpec(name, tuple(tensor.shape))


def spec_bytes(spec: TensorSpec) -> int:
    """Size of the frame that `spec` describes.

    Raises:
        ProtocolError: unknown dtype or a negative extent.
    """
    if spec.dtype not in _ITEM_BYTES:
        raise ProtocolError(f"embeddings of dtype {spec.dtype!r} are not understood")
    if any(extent < 0 for extent in spec.shape):
        raise ProtocolError(f"no tensor has the shape {spec.shape}")
    return spec.elements * _ITEM_BYTES[spec.dtype]


def tensor_frame(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor, without a copy where it is contiguous."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it keeps more memory than its own."""
    whole: int = tensor.untyped_storage().nbytes()
    return tensor if whole == tensor.nbytes else tensor.clone()


def view_tensor(raw: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """View bytes (uint8, one dimension, aligned) as the tensor that `spec` describes.

    No copy is made; the tensor keeps `raw` alive.

    Args:
        raw: uint8, one dimension, aligned to the dtype.
        spec: dtype and shape.

    Raises:
        ProtocolError: not exactly as many bytes as `spec` says.
    """
    import torch

    expected = spec_bytes(spec)
    if raw.nbytes != expected:
        raise ProtocolError(f"{raw.nbytes} bytes for a tensor of {expected}")
    return torch.from_numpy(raw).view(getattr(torch, spec.dtype)).reshape(spec.shape)
