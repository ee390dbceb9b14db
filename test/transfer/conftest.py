from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq

from sglang_epd.transfer import arena as arena_module
from sglang_epd.transfer import gate
from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.control import Claims
from sglang_epd.transfer.delivery import GrantLostError
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire import messages as wire
from sglang_epd.wire.tensors import spec_bytes, tensor_frame

PATIENCE_S = 10.0
BUDGET = 1 << 20
READERS = 3
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (2, 4)), [[1, 2, 4]])
EMBEDDING = torch.arange(8, dtype=torch.float32).reshape(2, 4)
# Of an item that takes all of the budget.
FULL = wire.Layout("IMAGE", wire.TensorSpec("float32", (BUDGET // 16, 4)), [[1, 2, 4]])
_TELL = "from sglang_epd.transfer import host; print(host.this_process(), flush=True); input()"


async def encode(
    sender: Sender, endpoint: str, offer: wire.Offer, embedding: torch.Tensor, timeout_s: float
) -> str:
    """Offer an item until it is taken, as an encoder does; how it went, or why it was declined."""
    while True:
        async with sender.offer(endpoint, offer) as offered:
            decision = await offered.decided
            if isinstance(decision, wire.Decline):
                return decision.reason
            try:
                return await sender.deliver(endpoint, decision, embedding, timeout_s)
            except GrantLostError:
                offer = msgspec.structs.replace(offer, renewal=True)


class SlowWriter:
    """Stands before a sender's writer into shared memory, in its thread, until it may go on."""

    def __init__(self, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sglang_epd.transfer.sender._SMALL_BYTES", 0)
        self.writing, self.go_on = threading.Event(), threading.Event()
        self._write = sender._shared.write
        monkeypatch.setattr(sender._shared, "write", self._slowly)

    def _slowly(self, landing: wire.Shared, raw: np.ndarray) -> None:
        self.writing.set()
        assert self.go_on.wait(PATIENCE_S)
        self._write(landing, raw)


class Peer:
    """The other end of a ROUTER, spoken to by hand."""

    def __init__(self, context: zmq.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith("ipc:"):
            self.socket.connect(endpoint)
        else:
            gate.dial(self.socket, endpoint)

    def send(self, message: wire.Message | bytes, *frames: bytes | memoryview) -> None:
        head = wire.encode_message(message) if isinstance(message, wire.Message) else message
        self.socket.send_multipart([head, *frames])

    def receive(self) -> wire.Message:
        assert self.socket.poll(PATIENCE_S * 1e3), "no answer"
        return wire.decode_message(self.socket.recv())

    def ask(self, message: wire.Message | bytes, *frames: bytes | memoryview) -> wire.Message:
        self.send(message, *frames)
        return self.receive()

    def offer(
        self,
        ticket: str = "t",
        item: int = 0,
        layout: wire.Layout = LAYOUT,
        process: str = "",
        engine: str = "",
    ) -> wire.Message:
        nbytes = spec_bytes(layout.embedding)
        key = bytes([item]) * 32
        return self.ask(wire.Offer(ticket, item, key, layout, nbytes, process, engine))

    def grant(self, ticket: str = "t", item: int = 0, **more: object) -> wire.Grant:
        answer = self.offer(ticket, item, **more)
        assert isinstance(answer, wire.Grant), answer
        return answer

    def deliver(self, grant: wire.Grant, embedding: torch.Tensor = EMBEDDING) -> wire.Message:
        """Send a payload on the channel, in one frame."""
        payload = wire.Payload(grant.ticket, grant.item, grant.grant)
        return self.ask(payload, tensor_frame(embedding))

    def flush(self) -> None:
        """Come back when all that was sent before has been read."""
        answer = self.ask(wire.Payload("flush", 0, 0))
        assert answer == wire.Ack("flush", 0, 0, "not_granted")


class Scheduler:
    """A scheduler's end, as its thread uses it."""

    def __init__(self, control_path: Path, first_reader: int = 0, readers: int = 1) -> None:
        self.claims = Claims(control_path, first_reader, readers)
        self.arena: Arena = self.claims.connect(PATIENCE_S)
        self._settled: list[wire.Settled] = []

    def expecting(self, name: str = "r", ticket: str = "t", **more: object) -> wire.Expect:
        """Claim a ticket's items under a name, and see that the receiver knows."""
        values = {"items": 1, "ttl_s": 60.0, **more}
        expect = wire.Expect(ticket, **values)
        self.claims.claim(name, expect)
        self.flush()
        return expect

    def flush(self) -> None:
        """Come back when all that was sent before has been read."""
        self.claims.socket.send(wire.encode_message(wire.Hello()))
        while True:
            assert self.claims.socket.poll(PATIENCE_S * 1e3), "no answer"
            frame = self.claims.socket.recv()
            message = wire.decode_message(frame, wire.MAX_CONTROL_BYTES)
            if isinstance(message, wire.Welcome):
                return
            self._settled.append(message)

    def settle(self, count: int = 1) -> list[wire.Settled]:
        """Wait until so many claims have settled."""
        limit = time.monotonic() + PATIENCE_S
        while len(self._settled) < count:
            left_s = max(0.0, limit - time.monotonic())
            assert self.claims.socket.poll(left_s * 1e3), f"{len(self._settled)} of {count}"
            self._settled += self.claims.take()
        settled, self._settled = self._settled[:count], self._settled[count:]
        return settled

    def tensors(self, reader: int = 0) -> list[torch.Tensor]:
        """The embeddings of the next claim that settles."""
        (settled,) = self.settle()
        assert not settled.code, settled
        return [self.arena.read(item, reader) for item in settled.items]

    def close(self) -> None:
        self.claims.close()


@pytest.fixture
def control_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "control"


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers of unknown tickets are declined soon: most tests here make them on purpose."""
    monkeypatch.setattr(receiver_module, "_HOLD_S", 0.05)


class Forgetful(dict):
    def __setitem__(self, key: object, value: object) -> None:
        pass


@pytest.fixture(autouse=True)
def mapped_as_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process maps the arenas that it has made as another process would."""
    monkeypatch.setattr(arena_module, "_made_here", Forgetful())


@pytest.fixture
def start_receiver(control_path: Path) -> Iterator[Callable[..., Receiver]]:
    """Start a receiver with other settings than `receiver`'s; a list that is given gets the
    socket at which ends of encoders' connections are told."""
    started: list[Receiver] = []

    def start(monitored: list[zmq.Socket] | None = None, **more: object) -> Receiver:
        settings = {"budget_bytes": BUDGET, "readers": READERS, **more}
        started.append(Receiver("127.0.0.1", "127.0.0.1", control_path, **settings))
        if monitored is not None:
            monitored.append(started[-1]._payload.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        started[-1].start()
        return started[-1]

    yield start
    for receiver in started:
        receiver.stop()


@pytest.fixture
def receiver(start_receiver: Callable[..., Receiver]) -> Receiver:
    return start_receiver()


@pytest.fixture
def another_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The name of another process of this machine, and that process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process.stdout.readline().strip(), process
    process.kill()
    process.communicate()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def dial(context: zmq.Context) -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def dial(endpoint: str) -> Peer:
        peers.append(Peer(context, endpoint))
        return peers[-1]

    yield dial
    for peer in peers:
        peer.socket.close()


@pytest.fixture
def connect(dial: Callable[[str], Peer]) -> Callable[[Receiver], Peer]:
    """One more encoder at each call."""
    return lambda receiver: dial(receiver.endpoint)


@pytest.fixture
def encoder(receiver: Receiver, connect: Callable[[Receiver], Peer]) -> Peer:
    return connect(receiver)


@pytest.fixture
def tokenizer(receiver: Receiver, dial: Callable[[str], Peer], control_path: Path) -> Peer:
    return dial(f"ipc://{control_path}")


@pytest.fixture
def connect_scheduler(control_path: Path) -> Iterator[Callable[..., Scheduler]]:
    schedulers: list[Scheduler] = []

    def connect(first_reader: int = 0, readers: int = 1) -> Scheduler:
        schedulers.append(Scheduler(control_path, first_reader, readers))
        return schedulers[-1]

    yield connect
    for scheduler in schedulers:
        scheduler.close()


@pytest.fixture
def scheduler(receiver: Receiver, connect_scheduler: Callable[..., Scheduler]) -> Scheduler:
    return connect_scheduler()


@pytest.fixture
def remember() -> Callable[[], Callable[[], bool]]:
    """Note which descriptors and threads this process has; the answer says later whether it has
    no more of them."""

    def count() -> tuple[int, Counter[str]]:
        names = (thread.name for thread in threading.enumerate())
        threads = Counter(name for name in names if not name.startswith("asyncio_"))
        return len(os.listdir("/proc/self/fd")), threads

    def start() -> Callable[[], bool]:
        before = count()

        def no_more() -> bool:
            gc.collect()
            now = count()
            return now[0] <= before[0] and now[1] <= before[1]

        return no_more

    return start


@pytest.fixture
def resident_kib() -> Callable[[Arena], int]:
    """What of this process's mapping of an arena is in its page table."""

    def read(arena: Arena) -> int:
        first = arena.machine_address - arena.data_offset
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(f"{first:x}-"))
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    return read
