from __future__ import annotations

import gc

import pytest
import torch
import zmq

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.transfer.control import Claims
from sglang_epd.wire import messages as wire
from transfer.conftest import EMBEDDING, PATIENCE_S, until

EXPECT = wire.Expect("t", 1, 1, 60.0)


@pytest.fixture
def router(control_path, context):
    """A receiver that says what the test wants."""
    control_path.parent.mkdir()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{control_path}")
    yield router
    router.close()


@pytest.fixture
def claims(control_path):
    claims = Claims(control_path)
    yield claims
    claims.close()


def answer(router: zmq.Socket, *messages: wire.Message) -> wire.Message:
    peer, frame = router.recv_multipart()
    for message in messages:
        router.send_multipart([peer, wire.encode_message(message)])
    return wire.decode_message(frame)


def test_what_is_claimed_is_read_where_it_landed(receiver, encoder, claims):
    arena = claims.connect(PATIENCE_S)
    assert arena.address == receiver._arena.address
    claims.claim("r", EXPECT)
    encoder.deliver(encoder.grant())
    assert claims.socket.poll(PATIENCE_S * 1e3)
    (settled,) = claims.take()
    (item,) = settled.items
    tensor = arena.read(item, 0)
    assert torch.equal(tensor, EMBEDDING)
    assert receiver._reservations.held_bytes
    del tensor
    gc.collect()
    until(lambda: not receiver._reservations.held_bytes)


def test_taking_never_waits(receiver, claims):
    claims.connect(PATIENCE_S)
    claims.claim("r", EXPECT)
    assert claims.take() == []


def test_the_outcome_of_what_was_abandoned_comes_all_the_same(receiver, claims):
    claims.connect(PATIENCE_S)
    claims.claim("r", EXPECT)
    claims.abandon("r")
    assert claims.socket.poll(PATIENCE_S * 1e3)
    (settled,) = claims.take()
    assert (settled.claim, settled.code, settled.items) == ("r", "RequestCancelledError", ())


def test_the_items_of_what_was_abandoned_too_late_can_be_given_back(receiver, encoder, claims):
    arena = claims.connect(PATIENCE_S)
    claims.claim("r", EXPECT)
    encoder.deliver(encoder.grant())
    claims.abandon("r")  # it has settled, though nobody has looked
    assert claims.socket.poll(PATIENCE_S * 1e3)
    (settled,) = claims.take()
    for item in settled.items:
        arena.drop(item.slot, 0)
    until(lambda: not receiver._reservations.held_bytes)


def test_a_claim_says_who_will_read(router, control_path):
    claims = Claims(control_path, first_reader=3, readers=2)
    claims.claim("r", EXPECT)
    assert answer(router) == wire.Claim("r", EXPECT, 3, 2)
    claims.close()


def test_claims_made_before_there_is_a_receiver_wait_for_it(control_path, start_receiver, connect):
    control_path.parent.mkdir()
    claims = Claims(control_path)
    for number in range(2000):
        claims.claim(f"r{number}", wire.Expect("t", 1, 5000, 1e-3))
    start_receiver()
    settled: set[str] = set()
    while len(settled) < 2000:
        assert claims.socket.poll(PATIENCE_S * 1e3)
        settled |= {message.claim for message in claims.take()}
    claims.close()


def test_without_a_receiver_connecting_ends_in_time(claims):
    with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
        claims.connect(0.05)


@pytest.mark.parametrize(
    "reply",
    [
        wire.Hello(),
        wire.Settled("r"),
        wire.Welcome("tcp://x", "/etc/passwd", 1, bytes(32), 1),
    ],
)
def test_another_answer_than_a_welcome_is_refused(router, claims, reply):
    # Its own question reaches the ROUTER only after it was asked; so the answer is sent ahead.
    claims.abandon("to be known")
    answer(router, reply)
    with pytest.raises(ProtocolError):
        claims.connect(PATIENCE_S)


def test_what_is_no_outcome_is_refused(router, claims):
    claims.claim("r", EXPECT)
    answer(router, wire.Cancel("t"))
    assert claims.socket.poll(PATIENCE_S * 1e3)
    with pytest.raises(ProtocolError, match="Cancel"):
        claims.take()


def test_an_outcome_larger_than_an_encoders_message_is_taken(router, claims):
    layout = wire.Layout("VIDEO", wire.TensorSpec("float32", (1, 4)), [], {"times": "x" * 1000})
    landed = (wire.Landed(bytes(32), layout, 16, 0, 0),) * 300
    claims.claim("r", EXPECT)
    answer(router, wire.Settled("r", landed))
    assert claims.socket.poll(PATIENCE_S * 1e3)
    assert claims.take() == [wire.Settled("r", landed)]


def test_nothing_is_left_after_close(receiver, control_path, resources):
    def live_once():
        claims = Claims(control_path)
        claims.connect(PATIENCE_S)
        claims.close()

    live_once()
    before = resources()
    for _ in range(5):
        live_once()
    gc.collect()
    after = resources()
    assert after[1] == before[1]
    assert after[0] - before[0] <= 5  # the receiver's ends, which close a moment later
