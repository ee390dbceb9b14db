from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_epd.errors import ProtocolError
from sglang_epd.wire import TensorSpec, read_tensor, tensor_frame, tensor_spec
from sglang_epd.wire.tensors import spec_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
extents = st.integers(0, 7)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


@given(st.sampled_from(DTYPES), st.tuples(extents, extents), st.booleans(), st.booleans())
def test_a_tensor_comes_back_bit_for_bit(dtype, shape, transposed, read_only):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if transposed:
        tensor = tensor.T
    spec = tensor_spec(tensor)
    frame = bytes(tensor_frame(tensor))
    assert len(frame) == spec_bytes(spec)
    back = read_tensor(memoryview(frame if read_only else bytearray(frame)), spec)
    assert tuple(back.shape) == tuple(tensor.shape)
    assert same_bits(back, tensor)
    back.zero_()  # it may be written to, whatever the frame was


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_survive(dtype):
    tensor = torch.tensor([[float("nan"), float("inf"), -0.0]], dtype=dtype)
    frame = memoryview(bytearray(tensor_frame(tensor)))
    assert same_bits(read_tensor(frame, tensor_spec(tensor)), tensor)


def test_sending_a_contiguous_tensor_copies_nothing():
    tensor = torch.zeros(3, 4)
    frame = tensor_frame(tensor)
    tensor.fill_(1.0)
    assert bytes(frame) == bytes(tensor_frame(torch.ones(3, 4)))


def test_a_tensor_that_needs_a_gradient_can_be_sent():
    assert tensor_frame(torch.zeros(2, 2, requires_grad=True)).nbytes == 16


def test_reading_a_writable_aligned_frame_copies_nothing():
    buffer = torch.arange(12, dtype=torch.float32)
    tensor = read_tensor(tensor_frame(buffer), TensorSpec("float32", (3, 4)))
    assert tensor.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_an_unaligned_frame_is_read_all_the_same(offset):
    values = torch.arange(6, dtype=torch.float32)
    buffer = bytearray(offset) + bytearray(tensor_frame(values))
    tensor = read_tensor(memoryview(buffer)[offset:], TensorSpec("float32", (2, 3)))
    assert torch.equal(tensor.flatten(), values)
    assert tensor.data_ptr() % 4 == 0


def test_the_tensor_outlives_the_frame():
    buffer = bytearray(tensor_frame(torch.ones(2, 2)))
    tensor = read_tensor(memoryview(buffer), TensorSpec("float32", (2, 2)))
    del buffer
    assert torch.equal(tensor, torch.ones(2, 2))


@given(st.integers(0, 64), st.sampled_from(("float32", "bfloat16", "float16")))
def test_a_frame_of_another_length_is_refused(length, dtype):
    spec = TensorSpec(dtype, (3, 4))
    if length == spec_bytes(spec):
        return
    with pytest.raises(ProtocolError, match=f"of {length} bytes"):
        read_tensor(memoryview(bytearray(length)), spec)


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "storage", "__class__", ""])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(ProtocolError, match="not understood"):
        read_tensor(memoryview(bytearray(4)), TensorSpec(dtype, (1, 1)))


def test_a_negative_extent_is_refused():
    with pytest.raises(ProtocolError, match="shape"):
        read_tensor(memoryview(bytearray(24)), TensorSpec("float32", (-2, -3)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_a_tensor_of_another_dtype_is_not_sent(dtype):
    with pytest.raises(ProtocolError, match="cannot be sent"):
        tensor_spec(torch.zeros(1, 1, dtype=dtype))
