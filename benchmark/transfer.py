"""How fast an embedding gets from one process into another, by each way there is.

    .venv/bin/python benchmark/transfer.py [--sizes 1 8 64 256] [--repeats 20]

A sender and a receiver process on this machine. For each size (MiB), all ways take turns
in one run: a memcpy within one process, a raw TCP socket, raw Mooncake, this package's
three landings (shared memory, frames on the socket, Mooncake), and the frames and
functions of in-tree EPD's zmq_to_scheduler. The time of a transfer runs from the moment
the sender has the embedding and the permission to send it, until the receiver's scheduler
could read it; both processes read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import pickle
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import zmq
from pages import machine

from sglang_epd.transfer.control import Claims
from sglang_epd.transfer.delivery import Granted
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter
from sglang_epd.wire.messages import Arrived, AskPrefix, Expect, Layout, Offer, Settled, TensorSpec

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
WIDTH = 1024
HOST = "127.0.0.1"


class Way(Protocol):
    """One way: `transfer` sends `payload` and returns the seconds it took."""

    def transfer(self, payload: torch.Tensor) -> float: ...


class Memcpy:
    """The bound: one copy into memory that is warm, in one process."""

    def __init__(self, largest: int) -> None:
        self._target = np.zeros(largest, np.uint8)

    def transfer(self, payload: torch.Tensor) -> float:
        raw = payload.numpy().reshape(-1).view(np.uint8)
        begin = time.monotonic()
        np.copyto(self._target[: len(raw)], raw)
        return time.monotonic() - begin


class RawSocket:
    """`sendall` on one side, `recv_into` warm memory on the other."""

    def __init__(self, largest: int) -> None:
        self._child = Child(_socket_receiver, largest)
        self._socket = socket.create_connection((HOST, self._child.get()))

    def transfer(self, payload: torch.Tensor) -> float:
        raw = payload.numpy().data.cast("B")
        self._child.put(raw.nbytes)
        begin = time.monotonic()
        self._socket.sendall(raw)
        return float(self._child.get()) - begin


class RawMooncake:
    """One blocking write from registered memory into registered memory."""

    def __init__(self, largest: int) -> None:
        self._engine = _mooncake()
        self._child = Child(_mooncake_receiver, largest)
        self._session, self._address = self._child.get()
        self._source = np.zeros(largest, np.uint8)
        self._engine.register(self._source.ctypes.data, largest)

    def transfer(self, payload: torch.Tensor) -> float:
        raw = payload.numpy().reshape(-1).view(np.uint8)
        self._source[: len(raw)] = raw
        begin = time.monotonic()
        self._engine.write(self._session, self._source.ctypes.data, self._address, len(raw), 60.0)
        return time.monotonic() - begin


class InTree:
    """The frames that in-tree EPD sends, and what its scheduler does with them."""

    def __init__(self, largest: int) -> None:
        self._child = Child(_in_tree_receiver, largest)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(f"tcp://{HOST}:{self._child.get()}")

    def transfer(self, payload: torch.Tensor) -> float:
        from sglang.srt.disaggregation.encoder.receiver import EmbeddingData
        from sglang.srt.managers.schedule_batch import Modality

        self._child.put(payload.nbytes)
        begin = time.monotonic()
        grid = torch.tensor([[1, 2, 2]])
        data = EmbeddingData("rid", 1, 0, grid, Modality.IMAGE, payload)
        header = pickle.dumps(data.copy_without_embedding())
        self._socket.send_multipart([header, payload.numpy().data.cast("B")], copy=False)
        return float(self._child.get()) - begin


class Ours:
    """This package: offer, grant, payload; until the scheduler's claim has settled."""

    def __init__(self, largest: int, landing: str) -> None:
        self._landing = landing
        self._child = Child(_our_receiver, largest, landing)
        self._endpoint = self._child.get()
        remote = RemoteWriter(_mooncake()) if landing == "remote" else None
        self._loop = asyncio.new_event_loop()
        self._sender = self._loop.run_until_complete(self._open(remote))

    async def _open(self, remote: RemoteWriter | None) -> Sender:
        return Sender(remote, share_memory=self._landing == "shared")

    def close(self) -> None:
        self._loop.run_until_complete(self._sender.close())
        self._loop.close()

    def transfer(self, payload: torch.Tensor) -> float:
        ticket = secrets.token_hex(8)
        self._child.put(ticket)
        self._child.get()
        begin = self._loop.run_until_complete(self._deliver(ticket, payload))
        return float(self._child.get()) - begin

    async def _deliver(self, ticket: str, payload: torch.Tensor) -> float:
        spec = TensorSpec("float32", tuple(payload.shape))
        layout = Layout("IMAGE", spec, [[1, 2, 2]])
        offer = Offer(ticket, 0, bytes(32), layout, payload.nbytes)
        async with self._sender.offer(self._endpoint, offer) as offered:
            granted = await offered.decided
            assert isinstance(granted, Granted)
            begin = time.monotonic()
            how = await self._sender.deliver(self._endpoint, granted, payload, 60.0)
            assert how == self._landing, how
        return begin


class Child:
    """A receiver process and a pipe to it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        whole = (target, theirs, *arguments)
        self._process = context.Process(target=_until_hung_up, args=whole, daemon=True)
        self._process.start()

    def get(self) -> Any:
        return self._pipe.recv()

    def put(self, value: Any) -> None:
        self._pipe.send(value)


def _until_hung_up(target: Callable[..., None], *arguments: Any) -> None:
    with suppress(EOFError):
        target(*arguments)


def _socket_receiver(pipe: Connection, largest: int) -> None:
    target = np.zeros(largest, np.uint8).data
    with socket.create_server((HOST, 0)) as server:
        pipe.send(server.getsockname()[1])
        peer, _ = server.accept()
    while True:
        wanted = pipe.recv()
        got = 0
        while got < wanted:
            got += peer.recv_into(target[got:wanted])
        pipe.send(time.monotonic())


def _mooncake() -> MooncakeEngine:
    """Mooncake over TCP, started as SGLang does."""
    from mooncake.engine import TransferEngine

    os.environ |= {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "WARNING"}
    raw = TransferEngine()
    if code := raw.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"Mooncake does not start (code {code})")
    return MooncakeEngine(HOST, raw)


def _mooncake_receiver(pipe: Connection, largest: int) -> None:
    engine = _mooncake()
    target = np.zeros(largest, np.uint8)
    engine.register(target.ctypes.data, largest)
    pipe.send((engine.session, int(target.ctypes.data)))
    pipe.recv()


def _in_tree_receiver(pipe: Connection, largest: int) -> None:
    from sglang.srt.disaggregation.encoder.receiver import (
        EmbeddingData,
        WaitingZmqRequest,
        safe_pickle_loads,
    )

    assert EmbeddingData is not None
    with zmq.Context() as context, context.socket(zmq.PULL) as puller:
        pipe.send(puller.bind_to_random_port(f"tcp://{HOST}"))
        while True:
            pipe.recv()
            parts = puller.recv_multipart(copy=False)
            data = safe_pickle_loads(parts[0].buffer)
            WaitingZmqRequest._extract_embedding_from_buffer(None, data, parts)
            pipe.send(time.monotonic())


def _our_receiver(pipe: Connection, largest: int, landing: str) -> None:
    path = Path(tempfile.mkdtemp(prefix="sglang-epd-bench-")) / "control"
    engine = _mooncake() if landing == "remote" else None
    receiver = Receiver(HOST, HOST, path, budget_bytes=2 * largest, engine=engine)
    receiver.start()
    claims = Claims(path)
    arena = claims.connect(10.0)
    pipe.send(receiver.endpoint)
    while True:
        ticket = pipe.recv()
        claims.claim(ticket, Expect(ticket, 1, 60.0))
        pipe.send("claimed")
        told: list[Settled | AskPrefix | Arrived] = []
        while not told:
            claims.socket.poll(1000)
            told = claims.take()
        settled = told[0]
        assert isinstance(settled, Settled) and settled.items[0] is not None, settled
        embedding = arena.read(settled.items[0], 0)
        ready = time.monotonic()
        assert embedding[-1, -1] == 1.0
        del embedding
        pipe.send(ready)


@contextmanager
def ways(largest: int) -> Iterator[dict[str, Way]]:
    with (
        closing(Ours(largest, "shared")) as shared,
        closing(Ours(largest, "inline")) as inline,
        closing(Ours(largest, "remote")) as remote,
    ):
        yield {
            "memcpy": Memcpy(largest),
            "raw socket": RawSocket(largest),
            "raw Mooncake": RawMooncake(largest),
            "in-tree zmq_to_scheduler": InTree(largest),
            "sglang-epd, shared memory": shared,
            "sglang-epd, socket": inline,
            "sglang-epd, Mooncake": remote,
        }


def measure(sizes: list[int], repeats: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of every transfer, by way and size in MiB."""
    figures: dict[str, dict[int, list[float]]] = {}
    with ways(max(sizes) * MIB) as all_ways:
        for size in sizes:
            payload = torch.ones(size * MIB // 4 // WIDTH, WIDTH)
            for turn in range(-2, repeats):
                for name, way in all_ways.items():
                    seconds = way.transfer(payload)
                    if turn >= 0:
                        figures.setdefault(name, {}).setdefault(size, []).append(seconds)
    return figures


def page(figures: dict[str, dict[int, list[float]]], sizes: list[int], repeats: int) -> str:
    head = "| way | " + " | ".join(f"{size} MiB" for size in sizes) + " |"
    rows = [head, "|---|" + "---|" * len(sizes)]
    for name, by_size in figures.items():
        cells = []
        for size in sizes:
            middle = statistics.median(by_size[size])
            cells.append(f"{middle * 1e3:.2f} ms, {size * MIB / middle / 1e9:.2f} GB/s")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    table = "\n".join(rows)
    return f"""# One embedding from process to process

`{" ".join([".venv/bin/python", "benchmark/transfer.py", *sys.argv[1:]])}`: medians of
{repeats} transfers, all ways in turn, after two unmeasured ones. {machine()};
Mooncake over TCP; pyzmq {version("pyzmq")},
mooncake {version("mooncake-transfer-engine-non-cuda")}, sglang {version("sglang")}.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmark" / "results" / "transfer.md")
    options = parser.parse_args()
    text = page(measure(options.sizes, options.repeats), options.sizes, options.repeats)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
