from __future__ import annotations

import pytest
import torch

from sglang_epd.encoder.workers.channel import read_tensor, write_tensor
from sglang_epd.errors import ProtocolError
from sglang_epd.wire.messages import TensorSpec


def test_a_file_of_another_size_is_refused():
    fd = write_tensor(torch.zeros(3, 4))
    with pytest.raises(ProtocolError, match="48 bytes"):
        read_tensor(fd, TensorSpec("float32", (4, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5000])
def test_tensors_cross_by_value(dtype, rows):
    tensor = torch.randn(rows, 96).to(dtype)
    name = str(dtype).removeprefix("torch.")
    read = read_tensor(write_tensor(tensor), TensorSpec(name, (rows, 96)))
    assert torch.equal(read, tensor)
