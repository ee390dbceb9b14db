from __future__ import annotations

import logging
import random
import socket
import stat
import time
from urllib.parse import urlsplit

import pytest
import torch

from sglang_epd import wire
from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaForbiddenError,
    ProtocolError,
    RequestCancelledError,
)
from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.wire import messages, seal

LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (2, 4)), [[1, 2, 4]])
EMBEDDING = torch.arange(8, dtype=torch.float32).reshape(2, 4)
FRAME = bytes(32)


def expecting(items: int = 1, consumers: int = 1, ttl_s: float = 60.0) -> wire.Expect:
    return wire.Expect("t", items, consumers, ttl_s)


def test_an_item_arrives(receiver, encoder, settle):
    receiver.claim("r", expecting())
    grant = encoder.grant()
    assert encoder.deliver(grant) == wire.Ack("t", 0, grant)
    (settled,) = settle(1)
    assert (settled.rid, settled.error) == ("r", None)
    (item,) = settled.items
    assert (item.key, item.layout) == (bytes(32), LAYOUT)
    assert torch.equal(item.embedding, EMBEDDING)
    assert not receiver.dropped


def test_two_items_arrive_from_two_encoders(receiver, connect, settle):
    receiver.claim("r", expecting(items=2))
    first, second = connect(), connect()
    grant_0, grant_1 = first.grant(item=0), second.grant(item=1)
    second.deliver(grant_1, item=1, embedding=EMBEDDING + 100)
    assert not receiver.wake_socket.poll(0)
    first.deliver(grant_0, item=0)
    (settled,) = settle(1)
    assert torch.equal(settled.items[0].embedding, EMBEDDING)
    assert torch.equal(settled.items[1].embedding, EMBEDDING + 100)


def test_an_item_that_is_here_is_not_sent_again(receiver, encoder, connect, settle):
    receiver.claim("r", expecting(items=2))
    encoder.deliver(encoder.grant())
    assert connect().offer() == wire.Decline("t", 0, messages.DECLINE_DUPLICATE)
    encoder.deliver(encoder.grant(item=1), item=1)
    assert settle(1)[0].error is None
    assert connect().offer() == wire.Decline("t", 0, messages.DECLINE_DUPLICATE)


def test_an_offer_may_overtake_the_announcement(receiver, encoder, connect, settle, monkeypatch):
    """They come over two sockets; the request must not wait for ever for a declined item."""
    monkeypatch.setattr(receiver_module, "_HOLD_S", 60.0)
    encoder.send(wire.Offer("t", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    # Another question answered: the offer was seen, and nothing is known of its ticket.
    receiver.claim("other", wire.Expect("known", 1, 1, 60.0))
    assert isinstance(connect().offer("known"), wire.Grant)
    assert not encoder.socket.poll(0)
    receiver.claim("r", expecting())
    answer = encoder.receive()
    assert isinstance(answer, wire.Grant)
    encoder.deliver(answer.grant)
    assert settle(1)[0].error is None


def test_an_offer_of_nothing_known_is_declined_in_the_end(encoder):
    assert encoder.offer() == wire.Decline("t", 0, messages.DECLINE_UNKNOWN)


def test_few_offers_of_nothing_known_are_held(encoder, monkeypatch):
    monkeypatch.setattr(receiver_module, "_MAX_HELD", 3)
    monkeypatch.setattr(receiver_module, "_HOLD_S", 60.0)
    for number in range(3):
        encoder.send(wire.Offer(f"t{number}", 0, bytes(32), LAYOUT, EMBEDDING.nbytes))
    assert encoder.offer("t3") == wire.Decline("t3", 0, messages.DECLINE_UNKNOWN)


def test_a_late_payload_under_an_old_grant_is_dropped(receiver, encoder, connect, settle):
    receiver.claim("r", expecting())
    frozen, replacement = encoder, connect()
    old = frozen.grant()
    new = replacement.grant()
    assert frozen.deliver(old, embedding=-EMBEDDING).error
    assert receiver.dropped["payload"] == 1
    assert replacement.deliver(new).error == ""
    assert torch.equal(settle(1)[0].items[0].embedding, EMBEDDING)


@pytest.mark.parametrize("grant", [0, 1, -1, 2**63])
def test_a_payload_without_a_grant_is_dropped(receiver, encoder, tokenizer, grant):
    receiver.claim("r", expecting())
    assert encoder.deliver(grant).error == "no such grant"
    assert receiver.dropped["payload"] == 1


@pytest.mark.parametrize("frames", [[], [FRAME, FRAME], [FRAME[1:]], [FRAME + b"x"], [b""]])
def test_a_malformed_payload_is_dropped_and_the_grant_stays_good(receiver, encoder, settle, frames):
    receiver.claim("r", expecting())
    grant = encoder.grant()
    assert encoder.ask(wire.Payload("t", 0, grant), *frames).error
    assert encoder.deliver(grant).error == ""
    assert settle(1)[0].error is None


def test_an_offer_whose_size_and_shape_disagree_is_not_answered(receiver, encoder, settle):
    receiver.claim("r", expecting())
    encoder.send(wire.Offer("t", 0, b"k" * 32, LAYOUT, nbytes=1 << 40))
    encoder.deliver(encoder.grant())  # the next answer is the next offer's
    assert settle(1)[0].error is None
    assert receiver.dropped == {"ProtocolError": 1}


def test_an_offer_of_an_unknown_dtype_is_not_answered(receiver, encoder):
    receiver.claim("r", expecting())
    spec = wire.TensorSpec("int8", (2, 4))
    encoder.send(wire.Offer("t", 0, b"k" * 32, wire.Layout("IMAGE", spec, []), nbytes=8))
    encoder.grant()
    assert receiver.dropped == {"ProtocolError": 1}


def test_an_embedding_of_more_than_the_limit_is_declined(receiver, encoder):
    receiver.claim("r", expecting())
    large = wire.Layout("IMAGE", wire.TensorSpec("float32", (1 << 18, 2)), [])
    assert encoder.offer(layout=large).reason == messages.DECLINE_TOO_LARGE


def test_encoders_cannot_speak_for_the_tokenizer(receiver, encoder, settle):
    receiver.claim("r", expecting())
    for forbidden in (
        wire.Hello(),
        wire.Cancel("t"),
        wire.Fail("t", "EncodeError", "x"),
        wire.Expect("t2", 1, 1, 60.0),
        wire.Grant("t", 0, 1),
        wire.Ack("t", 0, 1),
        wire.Welcome("tcp://elsewhere"),
    ):
        encoder.send(forbidden)
    assert encoder.offer("t2") == wire.Decline("t2", 0, messages.DECLINE_UNKNOWN)
    encoder.deliver(encoder.grant())
    assert settle(1)[0].error is None
    assert receiver.dropped == {"ProtocolError": 7}


def test_the_tokenizer_does_not_speak_for_encoders(receiver, encoder, tokenizer):
    receiver.claim("r", expecting())
    tokenizer.send(wire.Offer("t", 0, b"k" * 32, LAYOUT, nbytes=32))
    tokenizer.send(wire.Payload("t", 0, 1), FRAME)
    assert tokenizer.ask(wire.Hello()) == wire.Welcome(receiver.endpoint)
    assert receiver.dropped == {"ProtocolError": 2}


def test_what_the_tokenizer_expects_can_be_delivered_before_it_is_claimed(
    receiver, encoder, tokenizer, settle
):
    tokenizer.send(expecting())
    tokenizer.ask(wire.Hello())  # what went before has been read
    encoder.deliver(encoder.grant())
    receiver.claim("r", expecting())
    assert settle(1)[0].error is None


def test_a_failure_reaches_who_waits_with_its_class(receiver, tokenizer, settle):
    receiver.claim("r", expecting())
    tokenizer.send(wire.Fail("t", "MediaForbiddenError", "image 1 of 1: no"))
    (settled,) = settle(1)
    assert type(settled.error) is MediaForbiddenError
    assert settled.error.message == "image 1 of 1: no"


def test_a_failure_of_an_unknown_class_is_a_failure(receiver, tokenizer, settle):
    receiver.claim("r", expecting())
    tokenizer.send(wire.Fail("t", "AddedLaterError", "x"))
    assert type(settle(1)[0].error) is EpdError


def test_a_cancelled_request_ends_and_takes_nothing_more(receiver, encoder, tokenizer, settle):
    receiver.claim("r", expecting())
    tokenizer.send(wire.Cancel("t"))
    assert isinstance(settle(1)[0].error, RequestCancelledError)
    assert encoder.offer() == wire.Decline("t", 0, messages.DECLINE_CANCELLED)


def test_an_abandoned_claim_is_told_so(receiver, encoder, settle):
    receiver.claim("r", expecting())
    receiver.abandon("r")
    assert isinstance(settle(1)[0].error, RequestCancelledError)
    assert encoder.offer() == wire.Decline("t", 0, messages.DECLINE_CANCELLED)


def test_nobody_waits_past_the_deadline(receiver, settle):
    started = time.monotonic()
    receiver.claim("r", expecting(ttl_s=0.05))
    assert isinstance(settle(1)[0].error, DeadlineError)
    assert 0.05 <= time.monotonic() - started < 2


def garbage(rng: random.Random) -> list[bytes]:
    """Frames that no encoder of ours sends."""
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randbytes(rng.randrange(40))]
    if kind == 1:
        return [seal(rng.randbytes(rng.randrange(40)))]
    if kind == 2:
        return [rng.randbytes(3) for _ in range(rng.randrange(1, 6))]
    if kind == 3:
        return [b"", b""]
    if kind == 4:
        return [seal(b"\x82\xa1t\xa6cancel\xa6ticket\xa1\xff")]  # text that is not UTF-8
    frame = bytearray(wire.encode_message(wire.Offer("t", 0, b"k" * 32, LAYOUT, 32)))
    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [bytes(frame[: rng.randrange(len(frame))])]


def test_ten_thousand_frames_of_garbage_do_no_harm(receiver, connect, settle, caplog):
    receiver.claim("r", expecting())
    hostile, honest = connect(), connect()
    rng = random.Random(0)
    with caplog.at_level(logging.DEBUG):
        for _ in range(10_000):
            hostile.socket.send_multipart(garbage(rng))
        # The last one is answered after all the others were read.
        hostile.offer("no such ticket")
        honest.deliver(honest.grant())
    assert settle(1)[0].error is None
    assert sum(receiver.dropped.values()) == 10_000
    assert set(receiver.dropped) == {"ProtocolError"}
    assert len(caplog.records) == 1, "one line a kind, whatever is sent"


def test_bytes_that_are_not_even_zmq_do_no_harm(receiver, encoder):
    address = urlsplit(receiver.endpoint)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(100)):
        with socket.create_connection((address.hostname, address.port)) as plain:
            plain.sendall(nonsense)
    assert isinstance(encoder.offer(), wire.Decline)


def test_a_peer_that_sends_frames_over_the_limit_is_disconnected(receiver, connect):
    hostile, honest = connect(), connect()
    hostile.send(wire.Payload("t", 0, 1), bytes((1 << 20) + 1))
    assert isinstance(honest.offer(), wire.Decline)
    assert not receiver.dropped


def test_a_surprise_in_one_message_does_not_end_the_thread(receiver, encoder, monkeypatch, caplog):
    def surprise(_offer):
        raise KeyError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(receiver._ledger, "offer", surprise)
        encoder.send(wire.Offer("t", 0, b"k" * 32, LAYOUT, 32))
        encoder.ask(wire.Payload("t", 0, 1))
    assert receiver.dropped["internal"] == 1
    assert "Could not handle a message" in caplog.text
    assert isinstance(encoder.offer(), wire.Decline)


def test_the_scheduler_is_woken_when_something_settled_and_only_then(receiver, encoder, settle):
    receiver.claim("r", expecting())
    grant = encoder.grant()
    assert not receiver.wake_socket.poll(0)
    assert receiver.take_settled() == []
    encoder.deliver(grant)
    settle(1)
    encoder.offer()  # one more turn of the thread: a second ring would be here by now
    assert not receiver.wake_socket.poll(0)
    assert receiver.take_settled() == []


@pytest.mark.timeout(30)
def test_a_busy_scheduler_never_blocks_nor_is_blocked(receiver, encoder, settle):
    """Neither direction's wake-ups wait for the other side to read them."""
    count = 3000
    for number in range(count):
        ticket = f"t{number}"
        receiver.claim(f"r{number}", wire.Expect(ticket, 1, 1, 60.0))
        receiver.abandon(f"r{number}")
    assert len({settled.rid for settled in settle(count)}) == count
    encoder.offer()


@pytest.mark.timeout(30)
def test_claims_made_before_the_thread_runs_wait_for_it(control_path):
    receiver = Receiver("127.0.0.1", "127.0.0.1", control_path)
    for number in range(5000):
        receiver.claim(f"r{number}", expecting(ttl_s=1e-3, consumers=5000))
    receiver.start()
    try:
        settled = []
        while len(settled) < 5000:
            assert receiver.wake_socket.poll(5000)
            settled += receiver.take_settled()
    finally:
        receiver.stop()


def test_only_this_user_reaches_the_control_channel(receiver, control_path):
    assert stat.S_IMODE(control_path.parent.stat().st_mode) == 0o700


def test_an_ipv6_address_is_bracketed(control_path):
    try:
        receiver = Receiver("::1", "::1", control_path)
    except Exception as error:
        pytest.skip(f"no IPv6 here: {error}")
    receiver.start()
    receiver.stop()
    assert receiver.endpoint.startswith("tcp://[::1]:")


def test_nothing_is_left_after_stop(control_path, resources):
    def live_once():
        receiver = Receiver("127.0.0.1", "127.0.0.1", control_path)
        receiver.start()
        receiver.claim("r", expecting())
        receiver.stop()

    live_once()  # what the process sets up once and keeps
    before = resources()
    for _ in range(5):
        live_once()
    assert resources() == before


def test_the_error_of_a_dropped_payload_says_what_was_wrong(receiver, encoder):
    receiver.claim("r", expecting())
    grant = encoder.grant()
    answer = encoder.ask(wire.Payload("t", 0, grant), FRAME[1:])
    assert answer == wire.Ack("t", 0, grant, "tensor frame of 31 bytes, 32 were granted")


def test_an_uninvited_claim_is_refused(receiver, settle):
    receiver.claim("r", expecting())
    receiver.claim("uninvited", expecting())
    (settled,) = settle(1)
    assert settled.rid == "uninvited"
    assert isinstance(settled.error, ProtocolError)
