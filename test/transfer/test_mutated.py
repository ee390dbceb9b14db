"""Random and mutated bytes wherever strangers, encoders and users may send some."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_epd.errors import MediaError, ProtocolError
from sglang_epd.media import MediaLimits, check_container, image_size
from sglang_epd.wire import http
from sglang_epd.wire import messages as wire
from sglang_epd.wire.envelope import seal
from transfer.conftest import EMBEDDING, LAYOUT, Peer, Scheduler
from transfer.receiver_process import MIB, receiver_process

KEY = b"k" * 32
EXPECT = wire.Expect("t", 2, 60.0, (KEY, b""), announcer="a")
# What encoders send; a stranger has no ticket, so none of these names the honest one's.
FROM_ENCODERS = (
    wire.Offer("x", 0, KEY, LAYOUT, EMBEDDING.nbytes),
    wire.Offer(
        "y", 1, KEY, wire.Layout("VIDEO", LAYOUT.embedding, [[1, 2, 4]] * 9, {"a": [1.5]}), 32
    ),
    wire.Payload("x", 0, 1),
    wire.Payload("x", 0, 1, 1 << 20, False),
    wire.Withdraw("x", 0, 1),
)
ALL = (
    *FROM_ENCODERS,
    EXPECT,
    wire.Claim("c", EXPECT, 0, 1, (1,), True),
    wire.Again("r", EXPECT),
    wire.Grant("t", 0, 1, 30.0, wire.Shared("/proc/1/fd/1", 1, KEY, 0)),
    wire.Grant("t", 0, 1, 30.0, wire.Remote("there:1", 7)),
    wire.Settled("c", (wire.Landed(KEY, LAYOUT, 32, 0, 0), None)),
    wire.AskPrefix("c", (KEY,), (LAYOUT,)),
    wire.Arrived("c", 0, 1),
    wire.TakePart("t", "c", "p", (0, 1)),
    wire.Beginning("r", (0, 1), (wire.Landed(KEY, LAYOUT, 32, 0, 0), None)),
    wire.Needed("t", (0, 1)),
    wire.Ack("t", 0, 1, "malformed"),
    wire.Decline("t", 0, "unknown"),
)
ITEMS = [
    http.EncodeItem(0, "IMAGE", "image 1", data=b"abc", options={"detail": "high"}),
    http.EncodeItem(1, "VIDEO", "video 1", url="http://media/x"),
]
BODIES = (
    http.EncodeRequest("r", "n", 30.0, http.ReplyTo("tcp://s@h:1", "t"), ITEMS),
    http.EncodeReply("r", "e", [http.ItemOutcome(0, "delivered", layout=LAYOUT, key=KEY)]),
    http.LayoutReply([http.ItemLayout(KEY, LAYOUT)]),
)
MAX_BODY = 1 << 16

FILES = (
    b"\0\0\0\x0cftypisom" + bytes(64),
    b"\x1a\x45\xdf\xa3\x84webm" + bytes(64),
    b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + bytes(16),
    b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(11) + b"\xff\xc0\0\x11\x08\0\x10\0\x10" + bytes(9),
    b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"VP8L" + bytes(9),
    b"GIF89a\x10\0\x10\0" + bytes(8),
    b"BM" + bytes(40),
)
_TELLING = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 80,
    b"\xff" * 8,
    b"\0" * 8,
    b"\xa1t",
    b"offer",
    b"\x80",
)


def mutated(rng: random.Random, frame: bytes, others: tuple[bytes, ...]) -> bytes:
    """A frame with a few bytes changed, taken away, put in, or taken from another."""
    kind = rng.randrange(16)
    if kind == 0:
        return rng.randbytes(rng.randrange(80))
    if kind == 1:
        return seal(rng.randbytes(rng.randrange(80)))
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        action = rng.randrange(5)
        if action == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del changed[at : at + rng.randrange(1, 9)]
        elif action == 2:
            changed[at:at] = rng.choice(_TELLING)
        elif action == 3:
            changed[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        else:
            other = rng.choice(others)
            begin = rng.randrange(len(other))
            changed[at:] = other[begin : begin + rng.randrange(1, len(other) + 1)]
    return bytes(changed)


def stream(seed: int, kinds: tuple[bytes, ...]) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        yield mutated(rng, rng.choice(kinds), kinds)


def _accepts(read: Callable[[bytes], object], *errors: type[Exception]) -> Callable[[bytes], bool]:
    def reads(data: bytes) -> bool:
        try:
            read(data)
        except errors:
            return False
        return True

    return reads


def read_offer(data: bytes) -> None:
    message = wire.decode_from_encoder(data)
    if isinstance(message, wire.UnreadOffer):
        message.read()


def _of_kind(kind: type) -> Callable[[bytes], bool]:
    return _accepts(lambda data: http.decode_body(data, kind, MAX_BODY), ProtocolError)


_MESSAGES = tuple(map(wire.encode_message, ALL))
_LIMITS = MediaLimits()
READERS = {
    "messages": (_accepts(wire.decode_message, ProtocolError), _MESSAGES),
    "offers": (
        _accepts(read_offer, ProtocolError),
        tuple(map(wire.encode_message, FROM_ENCODERS)),
    ),
    **{type(body).__name__: (_of_kind(type(body)), (http.encode_body(body),)) for body in BODIES},
    "containers": (_accepts(lambda data: check_container(data, _LIMITS), MediaError), FILES[:2]),
    "pictures": (_accepts(image_size), FILES[2:]),
}


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def read_all(name: str, count: int) -> None:
    read, kinds = READERS[name]
    assert all(read(kind) for kind in kinds), "what is mutated must be right first"
    frames = stream(len(name), kinds)
    for frame in itertools.islice(frames, count // 10):
        read(frame)
    gc.collect()
    before, began = resident(), time.monotonic()
    refused = sum(not read(frame) for frame in itertools.islice(frames, count))
    took = time.monotonic() - began
    print(f"{name}: {count} in {took:.1f} s, {count / took:.0f}/s, {refused} refused")
    assert resident() - before < 16 * MIB
    assert name == "pictures" or count // 10 < refused < count


@pytest.mark.parametrize("name", READERS)
def test_what_is_mutated_raises_nothing_but_what_is_documented(name: str) -> None:
    read_all(name, 2_000)


@pytest.mark.extended
@pytest.mark.parametrize("name", READERS)
def test_a_hundred_thousand_of_each_raise_nothing_but_what_is_documented(name: str) -> None:
    read_all(name, 100_000)


def bombard(control: Path, dial: Callable[[str], Peer], count: int, peers: int) -> None:
    """Frames at the payload port by connections that know its secret, and honest offers between."""
    with receiver_process(control, budget=8 * MIB) as process:
        scheduler = Scheduler(control)
        kinds = tuple(map(wire.encode_message, FROM_ENCODERS))
        frames = stream(1, kinds)
        hostile = [dial(process.endpoint) for _ in range(peers)]
        honest = dial(process.endpoint)
        rng, began = random.Random(2), time.monotonic()
        step = max(1, count // 20)
        before: tuple[int, int] | None = None
        for number in range(0, count, step):
            for frame in itertools.islice(frames, step):
                peer = rng.choice(hostile)
                more = [rng.randbytes(rng.randrange(40)) for _ in range(rng.choice((0, 0, 1, 2)))]
                peer.socket.send_multipart([frame, *more])
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
            scheduler.expecting(f"r{number}", f"honest-{number}")
            grant = honest.grant(f"honest-{number}")
            assert not honest.deliver(grant).error
            (settled,) = scheduler.settle()
            assert not settled.code
            scheduler.arena.drop(settled.items[0].slot, 0)
            if before is None:
                before = process.rss, process.descriptors
        took = time.monotonic() - began
        print(f"payload port: {count} in {took:.1f} s, {count / took:.0f}/s")
        limit = time.monotonic() + 10
        while (state := process.state())["unanswered"] or state["held"]:
            assert time.monotonic() < limit, state
            time.sleep(0.05)
        assert (state["internal"], state["quarantined"], state["entries"]) == (0, 0, 0)
        assert process.rss - before[0] < 16 * MIB
        assert process.descriptors <= before[1]
        scheduler.close()


def test_the_payload_port_outlives_what_is_mutated(tmp_path: Path, dial) -> None:
    bombard(tmp_path / "run" / "c", dial, 4_000, peers=3)


@pytest.mark.extended
def test_the_payload_port_outlives_much_that_is_mutated(tmp_path: Path, dial) -> None:
    bombard(tmp_path / "run" / "c", dial, 400_000, peers=8)
