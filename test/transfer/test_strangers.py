"""What others on the network can cost a language server: their bytes, and little time."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sglang_epd.wire import messages as wire
from sglang_epd.wire.envelope import seal
from transfer.conftest import EMBEDDING, LAYOUT, PATIENCE_S, Peer, Scheduler
from transfer.receiver_process import MIB, ReceiverProcess, receiver_process

# As many empty lists as one message holds; each is a byte here, and 56 once it is made.
LISTS = 261_000
SLACK = 4 * MIB


def costly_offer(ticket: str) -> bytes:
    offer = {
        "t": "offer",
        "ticket": ticket,
        "item": 0,
        "key": bytes(32),
        "layout": {"modality": "IMAGE", "embedding": ["float32", [2, 4]], "grid": [[]] * LISTS},
        "nbytes": 32,
    }
    frame = seal(msgspec.msgpack.encode(offer))
    assert len(frame) < wire.MAX_HEADER_BYTES
    return frame


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ReceiverProcess]:
    with receiver_process(tmp_path / "run" / "c", budget=64 * MIB) as process:
        yield process


@pytest.fixture
def scheduler(process: ReceiverProcess, tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(tmp_path / "run" / "c")
    yield scheduler
    scheduler.close()


class Stranger:
    """Speaks ZMTP by hand, as far as it is let."""

    def __init__(self, endpoint: str, mechanism: bytes) -> None:
        host, _, port = endpoint.rpartition("@")[2].rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        signature = b"\xff" + bytes(8) + b"\x7f"
        self.socket.sendall(signature + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))

    def command(self, name: bytes, body: bytes) -> None:
        text = bytes([len(name)]) + name + body
        self.socket.sendall(b"\x04" + bytes([len(text)]) + text)

    def sent(self, data: bytes, times: int) -> int:
        """How much is taken of it before the connection ends."""
        taken = 0
        with contextlib.suppress(OSError):
            for _ in range(times):
                self.socket.sendall(data)
                taken += len(data)
        return taken


def ready(stranger: Stranger) -> None:
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    stranger.command(b"READY", kind + b"\x08Identity" + struct.pack(">I", 0))


def guess(stranger: Stranger) -> None:
    stranger.command(b"HELLO", b"\x03epd\x20" + b"0" * 32)


def nothing(_: Stranger) -> None:
    pass


def test_frames_without_end_are_read_of_nobody_without_the_secret(
    process: ReceiverProcess, scheduler: Scheduler, dial
):
    """Of one message libzmq takes any number of frames, for 32 times their bytes."""
    scheduler.expecting()
    before = process.rss
    frames = b"\x01\x00" * (1 << 19)
    for mechanism, say in (
        (b"NULL", ready),
        (b"PLAIN", guess),
        (b"PLAIN", ready),
        (b"PLAIN", nothing),
    ):
        stranger = Stranger(process.endpoint, mechanism)
        say(stranger)
        # What the system buffers is all that can be sent.
        assert stranger.sent(frames, 64) < 32 * MIB, (mechanism, say)
        stranger.socket.close()
        assert process.rss - before < SLACK, (mechanism, say)
    assert isinstance(dial(process.endpoint).offer(), wire.Grant)


def test_whoever_does_not_know_the_secret_is_heard_by_nobody(process, scheduler, context):
    scheduler.expecting()
    place = process.endpoint.rpartition("@")[2]
    for secret in ("", "0" * 32, process.endpoint.partition("@")[0][6:-1]):
        peer = Peer(context, f"tcp://{secret}@{place}" if secret else f"tcp://{place}")
        peer.send(wire.Offer("t", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
        assert not peer.socket.poll(200)
        peer.socket.close()


def test_offers_of_unknown_tickets_cost_their_bytes(process, dial):
    """Sixty of them took over a gigabyte once, and the thread 90 ms each."""
    encoder = dial(process.endpoint)
    encoder.offer()
    before = process.rss
    frames = [costly_offer(f"unknown-{number}") for number in range(60)]
    for frame in frames:
        encoder.send(frame)
    most = 0
    for _ in frames:
        most = max(most, process.rss)
        assert encoder.receive().reason == wire.DECLINE_UNKNOWN
    assert most - before < sum(map(len, frames)) + SLACK
    assert process.state()["unanswered"] == 0


def test_a_costly_layout_of_a_known_ticket_is_refused_before_it_is_made(process, scheduler, dial):
    scheduler.expecting()
    encoder = dial(process.endpoint)
    encoder.flush()
    before = process.rss
    assert encoder.ask(costly_offer("t")) == wire.Decline("t", 0, wire.DECLINE_UNREADABLE)
    encoder.flush()
    assert process.rss - before < SLACK
    assert isinstance(encoder.offer(), wire.Grant)


def test_one_who_offers_much_of_nothing_known_crowds_nobody_else_out(process, scheduler, dial):
    """An honest offer may still overtake its announcement."""
    hostile, honest = dial(process.endpoint), dial(process.endpoint)
    for number in range(40):
        hostile.send(costly_offer(f"unknown-{number}"))
    for number in range(20):
        hostile.send(wire.Offer(f"small-{number}", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    # Nothing more fits: whatever is held next, something else has to go.
    assert hostile.receive().reason == wire.DECLINE_UNKNOWN
    hostile.send(wire.Payload("flush", 0, 0))
    while not isinstance(hostile.receive(), wire.Ack):
        pass
    honest.send(wire.Offer("t", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    honest.flush()
    scheduler.expecting()
    assert isinstance(honest.receive(), wire.Grant)
