from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket

import msgspec
import pytest
import torch

from sglang_epd.encoder.workers import channel
from sglang_epd.encoder.workers.channel import read_tensor, write_tensor
from sglang_epd.errors import ProtocolError
from sglang_epd.processes import packets
from sglang_epd.wire.messages import TensorSpec
from waiting import until


async def test_a_message_that_no_descriptor_is_left_for_is_sent_later():
    """A long one travels as a file: that there is none does not mean that the other end is gone."""
    ended: list[str] = []
    ours, theirs = packets.pair()
    decoder = msgspec.msgpack.Decoder(str)
    end = packets.Channel(ours, decoder, lambda *_: None, ended.append)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        end.send("long" * 50_000)
        await asyncio.sleep(0.05)
        assert (end.unsent, ended) == (1, [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await until(lambda: not end.unsent)
    assert packets.receive_now(theirs, decoder) == ("long" * 50_000, [])
    end.close()
    theirs.close()


async def test_a_message_that_cannot_be_encoded_holds_up_no_other():
    ours, theirs = packets.pair()
    decoder = msgspec.msgpack.Decoder()
    end = packets.Channel(ours, decoder, lambda *_: None, lambda _reason: None)
    with pytest.raises(TypeError):
        end.send({"x": object()})
    end.send("next")
    assert packets.receive_now(theirs, decoder) == ("next", [])
    end.close()
    theirs.close()


async def test_a_channel_that_is_short_of_descriptors_does_not_spin(monkeypatch):
    ours, theirs = packets.pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    decoder = msgspec.msgpack.Decoder()
    end = packets.Channel(ours, decoder, lambda *_: None, lambda _reason: None)
    while not end.unsent:
        end.send("x" * 1000)
    tries = []

    def short(*_):
        tries.append(1)
        raise OSError(errno.EMFILE, "too many open files")

    theirs.setblocking(False)
    with monkeypatch.context() as patched:
        patched.setattr(packets, "_send_packet", short)
        with pytest.raises(BlockingIOError):  # there is room again
            while True:
                packets.receive_now(theirs, decoder)
        await asyncio.sleep(0.2)
    assert 1 <= len(tries) < 40
    await until(lambda: not end.unsent)
    assert packets.receive_now(theirs, decoder) == ("x" * 1000, [])
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
