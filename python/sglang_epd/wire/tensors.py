"""Raw tensor frames: the bytes of a contiguous host tensor, nothing in between."""

from __future__ import annotations

import numpy as np
import torch

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import TensorSpec

# What an embedding may be made of; a frame of any other dtype is refused.
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Describe `tensor`.

    Raises:
        ProtocolError: a dtype that no frame may have.
    """
    if tensor.dtype not in _NAMES:
        raise ProtocolError(f"embeddings of dtype {tensor.dtype} cannot be sent")
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))


def spec_bytes(spec: TensorSpec) -> int:
    """Size of the frame that `spec` describes.

    Raises:
        ProtocolError: unknown dtype or a negative extent.
    """
    if spec.dtype not in _DTYPES:
        raise ProtocolError(f"embeddings of dtype {spec.dtype!r} are not understood")
    if any(extent < 0 for extent in spec.shape):
        raise ProtocolError(f"no tensor has the shape {spec.shape}")
    return spec.elements * _DTYPES[spec.dtype].itemsize


def tensor_frame(tensor: torch.Tensor) -> memoryview:
    """The bytes of a host tensor, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def view_tensor(raw: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """View bytes (uint8, one dimension, aligned) as the tensor that `spec` describes.

    No copy is made; the tensor keeps `raw` alive.

    Raises:
        ProtocolError: not exactly as many bytes as `spec` says.
    """
    expected = spec_bytes(spec)
    if raw.nbytes != expected:
        raise ProtocolError(f"{raw.nbytes} bytes for a tensor of {expected}")
    return torch.from_numpy(raw).view(_DTYPES[spec.dtype]).reshape(spec.shape)
