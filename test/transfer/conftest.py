from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from sglang_epd import wire
from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer.ledger import Settled
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.wire.tensors import tensor_frame

PATIENCE_MS = 5_000
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (2, 4)), [[1, 2, 4]])
EMBEDDING = torch.arange(8, dtype=torch.float32).reshape(2, 4)


class Peer:
    """The other end of a ROUTER, spoken to by hand."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, message: wire.Message | bytes, *frames: bytes | memoryview) -> None:
        head = wire.encode_message(message) if isinstance(message, wire.Message) else message
        self.socket.send_multipart([head, *frames])

    def receive(self) -> wire.Message:
        assert self.socket.poll(PATIENCE_MS), "no answer"
        return wire.decode_message(self.socket.recv())

    def ask(self, message: wire.Message | bytes, *frames: bytes | memoryview) -> wire.Message:
        self.send(message, *frames)
        return self.receive()

    def offer(
        self, ticket: str = "t", item: int = 0, layout: wire.Layout = LAYOUT
    ) -> wire.Grant | wire.Decline:
        nbytes = layout.embedding.elements * 4
        answer = self.ask(wire.Offer(ticket, item, bytes([item]) * 32, layout, nbytes))
        assert isinstance(answer, wire.Grant | wire.Decline)
        return answer

    def grant(self, ticket: str = "t", item: int = 0) -> int:
        answer = self.offer(ticket, item)
        assert isinstance(answer, wire.Grant), answer
        return answer.grant

    def deliver(
        self, grant: int, ticket: str = "t", item: int = 0, embedding: torch.Tensor = EMBEDDING
    ) -> wire.Ack:
        answer = self.ask(wire.Payload(ticket, item, grant), tensor_frame(embedding))
        assert isinstance(answer, wire.Ack)
        return answer


@pytest.fixture
def control_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "control"


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers of unknown tickets are declined soon: most tests here make them on purpose."""
    monkeypatch.setattr(receiver_module, "_HOLD_S", 0.05)


@pytest.fixture
def receiver(control_path: Path) -> Iterator[Receiver]:
    receiver = Receiver("127.0.0.1", "127.0.0.1", control_path, max_item_bytes=1 << 20)
    receiver.start()
    yield receiver
    receiver.stop()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def encoder(connect: Callable[[], Peer]) -> Peer:
    return connect()


@pytest.fixture
def tokenizer(receiver: Receiver, context: zmq.Context, control_path: Path) -> Iterator[Peer]:
    peer = Peer(context, f"ipc://{control_path}")
    yield peer
    peer.socket.close()


@pytest.fixture
def connect(receiver: Receiver, context: zmq.Context) -> Iterator[Callable[[], Peer]]:
    """One more encoder at each call."""
    peers: list[Peer] = []

    def connect() -> Peer:
        peers.append(Peer(context, receiver.endpoint))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def settle(receiver: Receiver) -> Callable[[int], list[Settled]]:
    """Wait, as an idle scheduler does, until so many claims have settled."""

    def wait(count: int) -> list[Settled]:
        settled: list[Settled] = []
        until = time.monotonic() + PATIENCE_MS / 1000
        while len(settled) < count:
            left_ms = max(0.0, until - time.monotonic()) * 1000
            assert receiver.wake_socket.poll(left_ms), f"{len(settled)} of {count} settled"
            settled += receiver.take_settled()
        return settled

    return wait


@pytest.fixture
def resources() -> Callable[[], tuple[int, list[str]]]:
    """Open file descriptors and the names of the threads of this process."""

    def count() -> tuple[int, list[str]]:
        return (
            len(os.listdir("/proc/self/fd")),
            sorted(thread.name for thread in threading.enumerate()),
        )

    return count
