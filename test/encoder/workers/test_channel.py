from __future__ import annotations

import errno
import os
from typing import Any

import msgspec
import pytest
import torch

from sglang_epd.encoder.workers import channel
from sglang_epd.encoder.workers.channel import read_tensor, write_tensor
from sglang_epd.errors import ProtocolError
from sglang_epd.processes import packets
from sglang_epd.wire.messages import TensorSpec
from waiting import until


@pytest.mark.parametrize("short", [errno.EMFILE, errno.ENOMEM, errno.ETOOMANYREFS])
async def test_who_is_short_of_something_is_not_alone(monkeypatch, short):
    """A message that has not been sent for that is sent later."""
    sent, ended = [], []

    def send(_end, message, _fds):
        if len(sent) < 2:
            sent.append(None)
            raise OSError(short, "none are left")
        sent.append(message)

    ours, theirs = packets.pair()
    end = packets.Channel(ours, msgspec.msgpack.Decoder(Any), lambda *_: None, ended.append)
    monkeypatch.setattr(packets, "send_now", send)
    end.send("message")
    await until(lambda: not end.unsent)
    assert (sent, ended) == ([None, None, "message"], [])
    end.close()
    theirs.close()


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


def test_a_tensor_is_read_where_no_mapping_is_left(monkeypatch):
    tensor = torch.randn(5000, 96)
    closed = write_tensor(tensor)
    os.close(closed)
    assert channel._mapped(closed, tensor.nbytes) is None
    monkeypatch.setattr(channel, "_mapped", lambda _fd, _nbytes: None)
    read = read_tensor(write_tensor(tensor), TensorSpec("float32", (5000, 96)))
    assert torch.equal(read, tensor)
