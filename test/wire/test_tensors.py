from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import TensorSpec
from sglang_epd.wire.tensors import spec_bytes, tensor_frame, tensor_spec, view_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
extents = st.integers(1, 7)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


def raw(frame: memoryview | bytes) -> np.ndarray:
    """Memory of one's own with those bytes in it."""
    return np.array(memoryview(frame), dtype=np.uint8)


@given(st.sampled_from(DTYPES), st.tuples(extents, extents), st.booleans())
def test_a_tensor_comes_back_bit_for_bit(dtype, shape, transposed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if transposed:
        tensor = tensor.T
    spec = tensor_spec(tensor)
    frame = bytes(tensor_frame(tensor))
    assert len(frame) == spec_bytes(spec)
    back = view_tensor(raw(frame), spec)
    assert tuple(back.shape) == tuple(tensor.shape)
    assert same_bits(back, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_survive(dtype):
    tensor = torch.tensor([[float("nan"), float("inf"), -0.0]], dtype=dtype)
    assert same_bits(view_tensor(raw(tensor_frame(tensor)), tensor_spec(tensor)), tensor)


def test_sending_a_contiguous_tensor_copies_nothing():
    tensor = torch.zeros(3, 4)
    frame = tensor_frame(tensor)
    tensor.fill_(1.0)
    assert bytes(frame) == bytes(tensor_frame(torch.ones(3, 4)))


def test_a_tensor_that_needs_a_gradient_can_be_sent():
    assert tensor_frame(torch.zeros(2, 2, requires_grad=True)).nbytes == 16


def test_reading_copies_nothing():
    memory = np.zeros(48, dtype=np.uint8)
    tensor = view_tensor(memory, TensorSpec("float32", (3, 4)))
    assert tensor.data_ptr() == memory.ctypes.data
    memory[:] = raw(tensor_frame(torch.ones(3, 4)))
    assert torch.equal(tensor, torch.ones(3, 4))


def test_the_memory_lives_as_long_as_any_view_of_the_tensor():
    memory = raw(tensor_frame(torch.ones(2, 2)))
    gone = weakref.ref(memory)
    row = view_tensor(memory, TensorSpec("float32", (2, 2)))[1]
    del memory
    gc.collect()
    assert gone() is not None
    assert row.tolist() == [1.0, 1.0]
    del row
    gc.collect()
    assert gone() is None


@given(st.integers(0, 64), st.sampled_from(("float32", "bfloat16", "float16")))
def test_a_frame_of_another_length_is_refused(length, dtype):
    spec = TensorSpec(dtype, (3, 4))
    if length == spec_bytes(spec):
        return
    with pytest.raises(ProtocolError, match=f"{length} bytes for"):
        view_tensor(np.zeros(length, np.uint8), spec)


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "storage", "__class__", ""])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ProtocolError, match="not understood"):
        view_tensor(np.zeros(4, np.uint8), TensorSpec(dtype, (1, 1)))


def test_a_negative_extent_is_refused():
    with pytest.raises(ProtocolError, match="shape"):
        view_tensor(np.zeros(24, np.uint8), TensorSpec("float32", (-2, -3)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_a_tensor_of_another_dtype_is_not_sent(dtype):
    with pytest.raises(ProtocolError, match="cannot be sent"):
        tensor_spec(torch.zeros(1, 1, dtype=dtype))
