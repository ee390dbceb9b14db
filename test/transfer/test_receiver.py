from __future__ import annotations

import ctypes
import gc
import os
import pickle
import socket
import stat
import threading
import time
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
import torch
import zmq

from sglang_epd.errors import EpdError
from sglang_epd.transfer import host
from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer.arena import Address, Arena
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.wire import messages as wire
from sglang_epd.wire.envelope import seal
from sglang_epd.wire.tensors import tensor_frame
from transfer.conftest import BUDGET, EMBEDDING, FULL, LAYOUT, PATIENCE_S, READERS
from waiting import reached

FRAME = bytes(32)
CHUNK = wire.MAX_CHUNK_BYTES


def held(receiver: Receiver) -> int:
    return receiver._reservations.held_bytes


class Engine:
    """A transfer engine whose remote writes are copies within this process."""

    name = "copying"
    session = "here:1"
    staged = False

    def __init__(self) -> None:
        self.registered: tuple[int, int] | None = None

    def register(self, address: int, nbytes: int) -> None:
        self.registered = address, nbytes

    def write(self, address: int, data: bytes) -> None:
        begin, nbytes = self.registered
        assert begin <= address <= address + len(data) <= begin + nbytes
        ctypes.memmove(address, data, len(data))


# The ways in which payloads land.


def test_an_item_arrives(receiver, encoder, scheduler):
    scheduler.expecting()
    grant = encoder.grant()
    assert grant.landing == wire.Inline()
    assert 0 < grant.ttl_s <= 30
    assert encoder.deliver(grant) == wire.Ack("t", 0, grant.grant)
    (settled,) = scheduler.settle()
    assert (settled.claim, settled.code) == ("r", "")
    (item,) = settled.items
    assert (item.key, item.layout) == (bytes(32), LAYOUT)
    assert torch.equal(scheduler.arena.read(item, 0), EMBEDDING)
    counts = receiver.tally.counts
    assert counts["payloads", "inline"] == counts["offers", ""] == counts["grants", ""] == 1
    assert counts["received_bytes", ""] == EMBEDDING.nbytes
    assert not any(counts["dropped", kind] for _, kind in counts)


def test_an_item_is_written_into_shared_memory(receiver, encoder, scheduler):
    scheduler.expecting()
    grant = encoder.grant(process=host.this_process())
    landing = grant.landing
    arena = Arena.open(Address(landing.path, landing.size, landing.seal))
    place = arena.span(landing.offset - arena.data_offset, EMBEDDING.nbytes)
    place[:] = np.frombuffer(tensor_frame(EMBEDDING), np.uint8)
    assert encoder.ask(wire.Payload("t", 0, grant.grant)) == wire.Ack("t", 0, grant.grant)
    (tensor,) = scheduler.tensors()
    assert torch.equal(tensor, EMBEDDING)
    place[:] = 0
    assert not tensor.any(), "nothing was copied on the way"
    assert receiver.tally.counts["payloads", "shared"] == 1


def test_an_item_is_written_by_a_transfer_engine(start_receiver, connect, connect_scheduler):
    engine = Engine()
    receiver = start_receiver(engine=engine)
    encoder, scheduler = connect(receiver), connect_scheduler()
    scheduler.expecting()
    grant = encoder.grant(engine="copying", process=host.this_process())
    assert isinstance(grant.landing, wire.Remote)
    assert grant.landing.session == engine.session
    engine.write(grant.landing.address, bytes(tensor_frame(EMBEDDING)))
    assert not encoder.ask(wire.Payload("t", 0, grant.grant)).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)
    assert receiver.tally.counts["payloads", "remote"] == 1


@pytest.mark.parametrize("engine", ["", "another"])
def test_an_encoder_without_the_receivers_engine_delivers_otherwise(
    start_receiver, connect, connect_scheduler, engine
):
    receiver = start_receiver(engine=Engine())
    encoder, scheduler = connect(receiver), connect_scheduler()
    scheduler.expecting(items=2)
    assert isinstance(
        encoder.grant(item=0, process="elsewhere/1/1", engine=engine).landing, wire.Inline
    )
    shared = encoder.grant(item=1, process=host.this_process(), engine=engine)
    assert isinstance(shared.landing, wire.Shared)
    encoder.ask(wire.Payload("t", 1, shared.grant))
    assert receiver.tally.counts["payloads", "shared"] == 1
    assert receiver.tally.counts["payloads", "remote"] == 0


# Memory.


def test_an_offer_waits_until_a_reader_drops_what_it_read(receiver, connect, scheduler):
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    first, second = connect(receiver), connect(receiver)
    embedding = torch.ones(BUDGET // 16, 4)
    grant = first.grant("a", layout=FULL)
    assert second.offer("b") == wire.Wait("b", 0)
    assert not first.deliver(grant, embedding).error
    tensors = scheduler.tensors()
    second.flush()
    assert not second.socket.poll(20), "it is still being read"
    tensors.clear()
    gc.collect()
    answer = second.receive()
    assert isinstance(answer, wire.Grant)
    assert not second.deliver(answer).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)
    assert receiver.tally.counts["waits", ""] == 1


def test_an_offer_that_finds_no_room_asks_at_once_for_what_was_dropped(
    start_receiver, connect, connect_scheduler, monkeypatch
):
    monkeypatch.setattr(receiver_module, "_HOUSEKEEPING_S", 3600)
    receiver = start_receiver()
    scheduler, encoder = connect_scheduler(), connect(receiver)
    for ticket in "ab":
        scheduler.expecting(ticket, ticket)
        answer = encoder.offer(ticket, layout=FULL)
        if isinstance(answer, wire.Wait):
            answer = encoder.receive()
        assert not encoder.deliver(answer, torch.ones(BUDGET // 16, 4)).error
        scheduler.tensors().clear()
        gc.collect()


def test_memory_that_nobody_could_be_told_of_is_free_at_once(
    start_receiver, connect, connect_scheduler
):
    ends: list[zmq.Socket] = []
    receiver, scheduler = start_receiver(monitored=ends), connect_scheduler()
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    first, gone = connect(receiver), connect(receiver)
    grant = first.grant("a", layout=FULL)
    waiting = gone.offer("b", layout=FULL, process=host.this_process())
    assert waiting == wire.Wait("b", 0)
    gone.socket.close()
    assert ends[0].poll(PATIENCE_S * 1e3), "the end of its connection is not known"
    first.send(wire.Withdraw("a", 0, grant.grant))
    reached(lambda: receiver.tally.counts["dropped", "unreachable"])
    reached(lambda: not held(receiver))
    assert not receiver._reservations.quarantined
    assert isinstance(first.offer("b"), wire.Grant), "the item is still wanted"


def test_memory_goes_to_the_encoder_that_took_over(receiver, connect, scheduler):
    """The one before may be frozen: its grant would end in quarantine."""
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    first, silent, other = (connect(receiver) for _ in range(3))
    grant = first.grant("a", layout=FULL)
    for encoder in (silent, other):
        waiting = encoder.offer("b", layout=FULL, process=host.this_process())
        assert waiting == wire.Wait("b", 0)
    first.send(wire.Withdraw("a", 0, grant.grant))
    taken = other.receive()
    assert isinstance(taken, wire.Grant)
    other.flush()
    assert not silent.socket.poll(50)
    assert not receiver._reservations.quarantined
    # Should that one give it back, the one before may have it.
    other.send(wire.Withdraw("b", 0, taken.grant))
    assert isinstance(silent.receive(), wire.Grant)


def test_an_encoder_is_asked_about_memory_that_it_may_write_to(
    receiver, connect, scheduler, monkeypatch
):
    monkeypatch.setattr(receiver_module, "_ASK_S", 0.05)
    scheduler.expecting()
    encoder = connect(receiver)
    grant = encoder.grant(process=host.this_process())
    scheduler.claims.abandon("r")
    for _ in range(2):
        assert encoder.receive() == wire.Grant("t", 0, grant.grant, 0.0, wire.Inline())
    assert len(receiver._reservations.quarantined) == 1
    encoder.send(wire.Withdraw("t", 0, grant.grant))
    reached(lambda: not held(receiver))


def test_a_request_that_waits_is_told_when_it_is_over(receiver, connect, scheduler, tokenizer):
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    first, second = connect(receiver), connect(receiver)
    first.grant("a", layout=FULL)
    assert second.offer("b") == wire.Wait("b", 0)
    tokenizer.send(wire.Cancel("b"))
    assert second.receive() == wire.Decline("b", 0, wire.DECLINE_CANCELLED)


def test_an_unused_grant_expires_and_its_late_payload_is_dropped(
    start_receiver, connect, connect_scheduler
):
    receiver = start_receiver(grant_ttl_s=0.05)
    encoder, scheduler = connect(receiver), connect_scheduler()
    scheduler.expecting()
    grant = encoder.grant()
    reached(lambda: receiver.tally.counts["expired_grants", ""])
    assert held(receiver) == 0
    assert encoder.deliver(grant) == wire.Ack("t", 0, grant.grant, wire.ACK_NOT_GRANTED)
    assert receiver.tally.counts["dropped", "not_granted"] == 1
    while encoder.deliver(encoder.grant()).error:
        pass  # a slow machine
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)


def test_a_frozen_encoder_keeps_its_memory_until_it_is_gone(
    start_receiver, connect, connect_scheduler, another_process
):
    name, process = another_process
    receiver = start_receiver(grant_ttl_s=0.05)
    frozen, other, scheduler = connect(receiver), connect(receiver), connect_scheduler()
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    assert isinstance(frozen.grant("a", layout=FULL, process=name).landing, wire.Shared)
    reached(lambda: receiver._reservations.quarantined)
    assert other.offer("b") == wire.Wait("b", 0)
    other.flush()
    assert not other.socket.poll(100), "it might yet write there"
    process.kill()
    process.wait()
    assert isinstance(other.receive(), wire.Grant)


def test_a_frozen_encoder_that_thaws_gives_its_memory_back(
    start_receiver, connect, connect_scheduler
):
    receiver = start_receiver(grant_ttl_s=0.05)
    frozen, other, scheduler = connect(receiver), connect(receiver), connect_scheduler()
    scheduler.expecting("a", "a")
    scheduler.expecting("b", "b")
    grant = frozen.grant("a", layout=FULL, process=host.this_process())
    reached(lambda: receiver._reservations.quarantined)
    assert other.offer("b") == wire.Wait("b", 0)
    # Whoever only guesses the grant's number gives nothing back.
    other.send(wire.Withdraw("b", 0, grant.grant))
    other.flush()
    assert len(receiver._reservations.quarantined) == 1
    late = frozen.ask(wire.Payload("a", 0, grant.grant))
    assert late == wire.Ack("a", 0, grant.grant, wire.ACK_NOT_GRANTED)
    assert isinstance(other.receive(), wire.Grant)


def test_idle_memory_goes_back_to_the_system(receiver, encoder, scheduler, monkeypatch):
    def in_use() -> int:
        return os.stat(receiver._arena.address.path).st_blocks * 512

    scheduler.expecting()
    nothing = in_use()
    grant = encoder.grant(layout=FULL)
    assert not encoder.deliver(grant, torch.ones(BUDGET // 16, 4)).error
    tensors = scheduler.tensors()
    monkeypatch.setattr(receiver_module, "_IDLE_S", 0.0)
    encoder.flush()
    assert in_use() >= BUDGET, "it is being read"
    assert tensors[0].min() == 1
    tensors.clear()
    gc.collect()
    reached(lambda: in_use() <= nothing + (64 << 10))
    scheduler.expecting("again", "again")
    assert not encoder.deliver(encoder.grant("again")).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)


def test_registered_memory_is_not_given_back(start_receiver, connect, monkeypatch):
    monkeypatch.setattr(receiver_module, "_IDLE_S", 0.0)
    monkeypatch.setattr(receiver_module, "_HOUSEKEEPING_S", 0.0)
    receiver = start_receiver(engine=Engine())
    receiver._arena.data[:] = 1
    encoder = connect(receiver)
    for _ in range(5):
        encoder.flush()
    assert receiver._arena.data.all()


# Offers.


def test_an_offer_may_overtake_the_announcement(receiver, encoder, scheduler, monkeypatch):
    """They come over two sockets; the request must not wait for ever for a declined item."""
    monkeypatch.setattr(receiver_module, "_HOLD_S", 60.0)
    encoder.send(wire.Offer("t", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    encoder.flush()  # the offer was seen, and nothing is known of its ticket
    assert not encoder.socket.poll(0)
    scheduler.expecting()
    answer = encoder.receive()
    assert isinstance(answer, wire.Grant)
    encoder.deliver(answer)
    assert not scheduler.settle()[0].code


def test_an_offer_of_nothing_known_is_declined_in_the_end_and_counted_once(receiver, encoder):
    assert encoder.offer() == wire.Decline("t", 0, wire.DECLINE_UNKNOWN)
    assert receiver.tally.counts["declines", wire.DECLINE_UNKNOWN] == 1


def test_few_offers_of_nothing_known_are_held(receiver, encoder, monkeypatch):
    least = receiver_module._MIN_UNKNOWN_BYTES
    monkeypatch.setattr(receiver_module, "_MAX_UNKNOWN_BYTES", 3 * least)
    monkeypatch.setattr(receiver_module, "_HOLD_S", 60.0)
    for number in range(3):
        encoder.send(wire.Offer(f"t{number}", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    assert encoder.offer("t3") == wire.Decline("t3", 0, wire.DECLINE_UNKNOWN)


def test_offers_of_nothing_known_cost_nothing_while_they_are_held(receiver, encoder, monkeypatch):
    """Anybody may make them; the thread that looks at them shares the scheduler's process."""
    monkeypatch.setattr(receiver_module, "_HOLD_S", 60.0)
    read = []
    monkeypatch.setattr(wire.UnreadOffer, "read", read.append)
    for number in range(30):
        encoder.send(wire.Offer(f"t{number}", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    encoder.flush()
    time.sleep(0.1)  # twenty turns of the thread
    assert len(receiver._held) == 30
    assert not read


# Payloads that are not what was granted.


@pytest.mark.parametrize("grant", [0, 1, -1, 2**63])
def test_a_payload_without_a_grant_is_dropped(receiver, encoder, scheduler, grant):
    scheduler.expecting()
    answer = encoder.ask(wire.Payload("t", 0, grant), FRAME)
    assert answer == wire.Ack("t", 0, grant, wire.ACK_NOT_GRANTED)
    assert receiver.tally.counts["dropped", "not_granted"] == 1


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([], {}),
        ([FRAME, FRAME], {}),
        ([FRAME[1:]], {}),
        ([FRAME + b"x"], {}),
        ([b""], {}),
        ([FRAME[:16]], {"offset": 16}),
        ([FRAME], {"offset": 1}),
        ([FRAME], {"offset": 2**63}),
        ([FRAME + b"x"], {"last": False}),
        ([FRAME[:16], FRAME[16:]], {"last": False}),
    ],
)
def test_a_malformed_payload_is_dropped_and_the_item_can_be_offered_again(
    receiver, encoder, scheduler, frames, what
):
    scheduler.expecting()
    grant = encoder.grant()
    answer = encoder.ask(wire.Payload("t", 0, grant.grant, **what), *frames)
    assert answer == wire.Ack("t", 0, grant.grant, wire.ACK_MALFORMED)
    assert receiver.tally.counts["dropped", "payload"] == 1
    assert held(receiver) == 0
    assert encoder.deliver(grant).error == wire.ACK_NOT_GRANTED
    assert not encoder.deliver(encoder.grant()).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)


@pytest.mark.parametrize("second", [0, 8, 15, 17, 24])
def test_chunks_come_in_order_without_gaps_or_overlaps(receiver, encoder, scheduler, second):
    scheduler.expecting()
    grant = encoder.grant()
    encoder.send(wire.Payload("t", 0, grant.grant, 0, last=False), FRAME[:16])
    answer = encoder.ask(wire.Payload("t", 0, grant.grant, second, last=True), FRAME[:16])
    assert answer.error == wire.ACK_MALFORMED
    assert not encoder.deliver(encoder.grant()).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)


def test_another_grants_chunks_do_not_count(receiver, encoder, scheduler):
    """What was written under an old grant of an item is not there under the next."""
    scheduler.expecting()
    old = encoder.grant()
    encoder.send(wire.Payload("t", 0, old.grant, 0, last=False), FRAME[:16])
    new = encoder.grant()
    rest = wire.Payload("t", 0, new.grant, 16, last=True)
    assert encoder.ask(rest, FRAME[:16]).error == wire.ACK_MALFORMED


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 1 << 40},
        {"nbytes": 8},
        {"layout": {**msgspec.to_builtins(LAYOUT), "grid": "none"}},
        {"layout": {**msgspec.to_builtins(LAYOUT), "grid": [[1, 1 << 30]]}},
    ],
    ids=["too much", "too little", "malformed", "too large a grid"],
)
def test_an_offer_that_cannot_be_read_is_declined_at_once(receiver, encoder, scheduler, change):
    """Its encoder may be of another version."""
    scheduler.expecting()
    offer = msgspec.msgpack.encode(wire.Offer("t", 0, bytes(32), LAYOUT, 32))
    body = seal(msgspec.msgpack.encode({**msgspec.msgpack.decode(offer), **change}))
    assert encoder.ask(body) == wire.Decline("t", 0, wire.DECLINE_UNREADABLE)
    reached(lambda: receiver.tally.counts["dropped", "ProtocolError"] == 1)
    assert not encoder.deliver(encoder.grant()).error, "one that can be is taken"


# Whoever else is on the network.


def test_encoders_cannot_speak_for_the_rest_of_the_server(receiver, encoder, scheduler):
    expect = scheduler.expecting()
    forbidden = (
        wire.Hello(),
        wire.Cancel("t"),
        wire.Fail("t", "EncodeError", "x"),
        wire.Expect("t2", 1, 60.0),
        wire.Claim("theirs", expect, 0, 1),
        wire.Abandon("r"),
        wire.Settled("r", (), "EncodeError", "x"),
        wire.Grant("t", 0, 1, 1.0, wire.Inline()),
        wire.Wait("t", 0),
        wire.Decline("t", 0, "unknown"),
        wire.Ack("t", 0, 1),
        wire.Welcome("tcp://elsewhere", "", 0, b"", 1),
    )
    for message in forbidden:
        encoder.send(message)
    assert encoder.offer("t2") == wire.Decline("t2", 0, wire.DECLINE_UNKNOWN)
    encoder.deliver(encoder.grant())
    assert not scheduler.settle()[0].code
    assert receiver.tally.counts["dropped", "ProtocolError"] == len(forbidden)


def test_the_tokenizer_does_not_speak_for_encoders(receiver, tokenizer):
    tokenizer.send(wire.Offer("t", 0, b"k" * 32, LAYOUT, nbytes=32))
    tokenizer.send(wire.Payload("t", 0, 1), FRAME)
    tokenizer.send(wire.Withdraw("t", 0, 1))
    address = receiver._arena.address
    assert tokenizer.ask(wire.Hello()) == wire.Welcome(
        receiver.endpoint, address.path, address.size, address.seal, READERS
    )
    assert receiver.tally.counts["dropped", "ProtocolError"] == 3


@pytest.mark.parametrize(
    "frame",
    [
        b"EPD\x02\x00" + b"\x81\xa1t\xa5hello",  # another major version
        pickle.dumps({"ticket": "t"}),
        b"\x80\x04\x95",
        b"EPD",
        b"",
    ],
)
def test_what_is_not_our_protocol_is_dropped(receiver, encoder, scheduler, caplog, frame):
    scheduler.expecting()
    for _ in range(3):
        encoder.socket.send_multipart([frame])
    encoder.deliver(encoder.grant())
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)
    assert receiver.tally.counts["dropped", "ProtocolError"] == 3
    assert len(caplog.records) == 1, "one line a kind, whatever is sent"


def test_bytes_that_are_not_even_zmq_do_no_harm(receiver, encoder):
    address = urlsplit(receiver.endpoint)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(100)):
        with socket.create_connection((address.hostname, address.port)) as plain:
            plain.sendall(nonsense)
    assert isinstance(encoder.offer(), wire.Decline)


def test_a_peer_that_sends_frames_over_the_limit_is_disconnected(receiver, connect, scheduler):
    scheduler.expecting()
    hostile, honest = connect(receiver), connect(receiver)
    grant = honest.grant()
    hostile.send(wire.Payload("t", 0, grant.grant), bytes(CHUNK + 1))
    assert not honest.deliver(grant).error
    assert torch.equal(scheduler.tensors()[0], EMBEDDING)
    assert not any(name == "dropped" for name, _ in receiver.tally.counts)


@pytest.mark.parametrize(
    ("method", "told"),
    [("knows", "Could not handle a message"), ("expire", "The receiver stumbled")],
    ids=["a message", "housekeeping"],
)
def test_a_surprise_does_not_end_the_thread(receiver, encoder, monkeypatch, caplog, method, told):
    def surprise(*_):
        raise KeyError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(receiver._ledger, method, surprise)
        encoder.send(wire.Offer("t", 0, b"k" * 32, LAYOUT, 32))
        reached(lambda: told in caplog.text)
    assert receiver.tally.counts["dropped", "internal"]
    reached(lambda: not receiver._held)
    assert isinstance(encoder.offer("u"), wire.Decline)


def test_a_surprise_at_a_handshake_does_not_end_the_thread(receiver, connect, monkeypatch, caplog):
    first = True

    def surprise() -> None:
        nonlocal first
        if first:
            first = False
            raise ValueError("a handshake of two frames")
        answer()

    answer = receiver._gate.answer
    monkeypatch.setattr(receiver._gate, "answer", surprise)
    encoder = connect(receiver)
    assert isinstance(encoder.offer(), wire.Decline)
    assert "The receiver stumbled" in caplog.text
    assert receiver.tally.counts["dropped", "internal"] == 1


def test_a_thread_that_has_died_says_so(start_receiver, caplog):
    """Its sockets are gone, as with a context that ended, or a library that failed."""
    died = threading.Event()
    receiver = start_receiver(on_death=died.set)
    receiver._payload.close()
    receiver._control.close()
    assert died.wait(10)
    assert "The receiver has died" in caplog.text


def test_a_thread_that_was_told_to_stop_has_not_died(control_path, caplog):
    died = threading.Event()
    receiver = Receiver(
        "127.0.0.1", "127.0.0.1", control_path, budget_bytes=1 << 20, on_death=died.set
    )
    receiver.start()
    receiver.stop()
    assert not receiver._thread.is_alive()
    assert not died.is_set()
    assert "died" not in caplog.text


# The rest of the server.


def test_a_failure_of_an_unknown_class_is_a_failure(scheduler, tokenizer):
    scheduler.expecting()
    tokenizer.send(wire.Fail("t", "AddedLaterError", "x"))
    assert scheduler.settle()[0].code == EpdError.__name__


def test_nobody_waits_past_the_deadline(receiver, scheduler):
    started = time.monotonic()
    scheduler.expecting(ttl_s=0.05)
    assert scheduler.settle()[0].code == "DeadlineError"
    assert 0.05 <= time.monotonic() - started < 5
    assert receiver.tally.counts["expired_requests", ""] == 1


@pytest.mark.parametrize(("first", "readers"), [(READERS, 1), (0, READERS + 1), (2**40, 1)])
def test_a_claim_for_readers_that_do_not_exist_is_dropped(
    receiver, connect_scheduler, first, readers
):
    scheduler = connect_scheduler(first, readers)
    scheduler.expecting()
    assert receiver.tally.counts["dropped", "ProtocolError"] == 1
    assert len(receiver._ledger) == 0


def test_only_this_user_reaches_the_control_channel(receiver, control_path):
    assert stat.S_IMODE(control_path.parent.stat().st_mode) == 0o700


def test_an_ipv6_address_is_bracketed(control_path):
    try:
        receiver = Receiver("::1", "::1", control_path, budget_bytes=BUDGET)
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    receiver.start()
    receiver.stop()
    assert "@[::1]:" in receiver.endpoint


def test_nothing_is_left_after_stop(control_path, remember):
    def live_once():
        receiver = Receiver("127.0.0.1", "127.0.0.1", control_path, budget_bytes=BUDGET)
        receiver.start()
        receiver.stop()
        assert not receiver._thread.is_alive()
        return receiver._arena.address.path

    path = live_once()  # what the process sets up once and keeps
    assert not os.path.lexists(path)
    no_more = remember()
    for _ in range(3):
        live_once()
    reached(no_more)
