from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
import zmq

from integrity import claimed
from sglang_epd.errors import EncodeError, ProtocolError, UnavailableError
from sglang_epd.transfer import control as control_module
from sglang_epd.transfer.control import Claims, Control
from sglang_epd.wire import messages as wire
from transfer.conftest import EMBEDDING, PATIENCE_S
from waiting import reached, until

EXPECT = wire.Expect("t", 1, 60.0)


@pytest.fixture
async def control(control_path) -> AsyncIterator[Control]:
    control = Control(control_path)
    yield control
    control.close()


@pytest.fixture
def router(control_path, context) -> Iterator[zmq.Socket]:
    """A receiver that says what the test wants."""
    control_path.parent.mkdir()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{control_path}")
    yield router
    router.close()


async def heard(router: zmq.Socket, kind: type[wire.Message]) -> tuple[bytes, wire.Message]:
    """The next message of a kind, and whose it is."""
    while True:
        assert await asyncio.to_thread(router.poll, PATIENCE_S * 1e3)
        peer, frame = router.recv_multipart()
        message = wire.decode_message(frame)
        if isinstance(message, kind):
            return peer, message


def say(router: zmq.Socket, peer: bytes, message: wire.Message) -> None:
    router.send_multipart([peer, wire.encode_message(message)])


async def deliver(encoder) -> None:
    await asyncio.to_thread(lambda: encoder.deliver(encoder.grant()))


async def until_free(receiver) -> None:
    await until(lambda: not receiver._reservations.held_bytes)


async def test_the_endpoint_is_asked_once(receiver, control):
    first = await asyncio.gather(*(control.endpoint(PATIENCE_S) for _ in range(5)))
    assert {*first, await control.endpoint(0.0)} == {receiver.endpoint}


async def test_all_who_ask_in_vain_are_told_within_their_own_time(control):
    started = time.monotonic()
    outcomes = await asyncio.gather(
        *(control.endpoint(0.1) for _ in range(100)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {UnavailableError}
    assert time.monotonic() - started < 5


async def test_a_receiver_that_comes_later_is_found(control, request):
    with pytest.raises(UnavailableError):
        await control.endpoint(0.05)
    receiver = request.getfixturevalue("receiver")
    assert await control.endpoint(PATIENCE_S) == receiver.endpoint


async def test_an_expected_request_can_be_delivered(receiver, control, encoder):
    await control.endpoint(PATIENCE_S)
    await control.expect(EXPECT)
    await until(lambda: len(receiver._ledger) == 1)
    assert isinstance(encoder.offer(), wire.Grant)


async def test_a_failure_reaches_who_waits(scheduler, control):
    await asyncio.to_thread(scheduler.expecting)
    await control.fail("t", EncodeError("no encoder could"))
    (settled,) = await asyncio.to_thread(scheduler.settle)
    assert (settled.code, settled.message) == ("EncodeError", "no encoder could")


async def test_items_are_collected_where_they_landed(receiver, control, encoder):
    collecting = asyncio.create_task(control.collect(EXPECT))
    await until(lambda: claimed(receiver._ledger))
    await deliver(encoder)
    items = await collecting
    assert torch.equal(items[0].embedding, EMBEDDING)
    assert receiver._reservations.held_bytes
    del collecting
    items.clear()
    await until_free(receiver)


async def test_what_became_of_them_instead_is_raised(receiver, control):
    collecting = asyncio.create_task(control.collect(EXPECT))
    await until(lambda: claimed(receiver._ledger))
    await control.fail("t", EncodeError("no encoder could"))
    with pytest.raises(EncodeError, match="no encoder could"):
        await collecting


async def test_each_claim_gets_its_own_outcome(receiver, control, dial):
    claims = [
        asyncio.create_task(control.claim(wire.Expect(f"t{number}", 1, 60.0)))
        for number in range(5)
    ]
    await until(lambda: claimed(receiver._ledger) == 5)
    for number in reversed(range(5)):
        await control.fail(f"t{number}", EncodeError(f"{number}"))
    settled = await asyncio.gather(*claims)
    assert [message.message for message in settled] == [str(number) for number in range(5)]


async def test_a_claim_that_is_cancelled_is_abandoned(receiver, control, encoder):
    claim = asyncio.create_task(control.claim(EXPECT))
    await until(lambda: claimed(receiver._ledger))
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await until(lambda: not len(receiver._ledger))
    assert encoder.offer().reason == wire.DECLINE_CANCELLED
    await control.expect(wire.Expect("next", 1, 60.0))
    await until(lambda: len(receiver._ledger) == 1)
    await until(lambda: not control._claims)


@pytest.mark.parametrize("moment", ["before it came", "as it came"])
async def test_items_that_came_after_all_are_given_back(
    receiver, control, encoder, moment, monkeypatch
):
    """Nobody else would ever say that they were dropped."""
    claim = asyncio.create_task(control.claim(EXPECT))
    await until(lambda: claimed(receiver._ledger))
    if moment == "as it came":
        # The outcome is there and the task has not gone on yet.
        settle = control._on_settled
        monkeypatch.setattr(control, "_on_settled", lambda m: (settle(m), claim.cancel()))
        await deliver(encoder)
        with pytest.raises(asyncio.CancelledError):
            await claim
    else:
        # It has settled at the receiver, and nobody has read it here.
        control._reader.cancel()
        await asyncio.gather(control._reader, return_exceptions=True)
        await deliver(encoder)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        control._reader = None
        control._start_reading()
    await until_free(receiver)
    assert not control._claims


async def test_a_claim_that_is_never_answered_ends(receiver, control, encoder, monkeypatch):
    """As where the receiver's thread is dead: the deadline was the receiver's to keep."""
    monkeypatch.setattr(control_module, "GRACE_S", 0.05)
    monkeypatch.setattr(control, "_on_settled", lambda _message: None)
    with pytest.raises(UnavailableError, match="does not answer"):
        await control.claim(wire.Expect("t", 1, 0.05))
    await until(lambda: not len(receiver._ledger))


async def test_a_claim_that_cannot_be_made_leaves_nothing(receiver, control, monkeypatch):
    await control.arena(PATIENCE_S)

    async def refuse(_message):
        raise UnavailableError("this server's receiver does not read")

    monkeypatch.setattr(control, "_send", refuse)
    with pytest.raises(UnavailableError):
        await control.claim(EXPECT)
    assert not control._claims


@pytest.mark.timeout(30)
async def test_a_receiver_that_reads_nothing_blocks_nobody(control, caplog):
    with pytest.raises(UnavailableError, match="does not read"):
        for number in range(5000):
            await control.expect(wire.Expect(f"t{number}", 1, 60.0))
    await control.cancel("t0")
    await control.fail("t1", EncodeError("x"))
    assert "Cancel is not told" in caplog.text
    assert "Fail is not told" in caplog.text


def test_it_may_be_made_before_the_event_loop_runs(receiver, control_path):
    async def ask() -> str:
        endpoint = await control.endpoint(PATIENCE_S)
        control.close()
        await asyncio.sleep(0)
        return endpoint

    control = Control(control_path)
    assert asyncio.run(ask()) == receiver.endpoint


async def test_what_is_no_answer_is_passed_over(router, control, caplog):
    asked = asyncio.create_task(control.endpoint(PATIENCE_S))
    peer, _ = await heard(router, wire.Hello)
    router.send_multipart([peer, b"garbage"])
    say(router, peer, wire.Hello())
    say(router, peer, wire.Settled("nobody's"))
    say(router, peer, wire.Welcome("tcp://here", "", 0, b"", 1))
    say(router, peer, wire.Welcome("tcp://elsewhere", "", 0, b"", 1))
    assert await asked == "tcp://here"
    assert "not a sglang-epd message" in caplog.text
    assert "Hello from the receiver" in caplog.text


async def sent_for_again(router, control):
    """The media of a request, before the receiver says where it is."""
    asked = asyncio.create_task(control.endpoint(PATIENCE_S))
    peer, _ = await heard(router, wire.Hello)
    say(router, peer, wire.Again("rid", wire.Expect("u", 1, 60.0, announcer=control.name)))
    say(router, peer, wire.Welcome("tcp://here", "", 0, b"", 1))
    assert await asked == "tcp://here"


@pytest.mark.parametrize(
    ("listens", "told"),
    [(True, "could not be sent for again"), (False, "sends for no media again")],
)
async def test_a_message_that_cannot_be_handled_is_not_the_last(
    router, control, caplog, listens, told
):
    """Every request of this server waits for the task that reads them."""

    async def stumble(_rid, _expect):
        raise RuntimeError("a request of an unknown kind")

    if listens:
        control.listen(stumble)
    await sent_for_again(router, control)
    _, failed = await heard(router, wire.Fail)
    assert (failed.ticket, failed.code) == ("u", "EncodeError")
    assert told in failed.message
    assert ("unknown kind" in caplog.text) == listens


async def test_media_that_are_read_again_keep_no_other_message_waiting(router, control):
    read = asyncio.Event()

    async def slow(_rid, _expect):
        await read.wait()

    control.listen(slow)
    await sent_for_again(router, control)
    read.set()


async def test_nothing_is_left_after_close(receiver, control_path, remember):
    async def live_once():
        control = Control(control_path)
        await control.arena(PATIENCE_S)
        control.close()
        await asyncio.sleep(0)

    await live_once()
    tasks, no_more = len(asyncio.all_tasks()), remember()
    for _ in range(20):
        await live_once()
    assert len(asyncio.all_tasks()) <= tasks + 1
    await until(no_more)


async def test_items_are_asked_for_again_where_they_were_announced(
    receiver, control_path, scheduler
):
    """One of several tokenizer processes; another announced something since."""
    controls = [Control(control_path) for _ in range(2)]
    asked: list[tuple[int, str, wire.Expect]] = []
    try:
        for number, control in enumerate(controls):

            async def again(rid, expect, n=number):
                asked.append((n, rid, expect))

            control.listen(again)
            await control.endpoint(PATIENCE_S)
            await control.expect(wire.Expect(f"t{number}", 1, 60.0))
            await asyncio.to_thread(scheduler.flush)
        lost = [wire.Expect("u", 1, 60.0, announcer=one.name) for one in controls]
        gone = wire.Expect("v", 1, 60.0, announcer="a process that ended")
        scheduler.claims.again("gone", gone)
        for number in (0, 1, 0):
            scheduler.claims.again("rid", lost[number])
        await until(lambda: len(asked) >= 3)
        # Two tokenizers' answers come in no order of their own.
        assert sorted(asked) == [(0, "rid", lost[0]), (0, "rid", lost[0]), (1, "rid", lost[1])]
        assert not receiver.tally.counts.keys() & {("dropped", "peer_not_reading")}
    finally:
        for control in controls:
            control.close()


async def test_a_second_request_for_the_same_item_needs_no_encoder(
    start_receiver, connect, control_path
):
    receiver = start_receiver(cache_bytes=1 << 20)
    control = Control(control_path)
    encoder = connect(receiver)
    key = b"\0" * 32  # as `Peer.offer` calls item 0
    try:
        arena = await control.arena(PATIENCE_S)
        for ticket, needed in (("t", (0,)), ("u", ())):
            expect = wire.Expect(ticket, 1, 60.0, (key,))
            with control.watched(ticket) as news:
                async with asyncio.timeout(PATIENCE_S):
                    await control.expect(expect)
                    assert await news.get() == wire.Needed(ticket, needed)
                    if needed:
                        await asyncio.to_thread(lambda: encoder.deliver(encoder.grant("t")))
                    settled = await control.claim(expect)
                    assert torch.equal(arena.read(settled.items[0], 0), EMBEDDING)
                    cached = 0 if needed else 1
                    assert await news.get() == wire.Needed(ticket, over=True, cached=cached)
            del settled
            await until_free(receiver)
        assert receiver.tally.counts["payloads", "inline"] == 1
        assert receiver.tally.counts["hits", "expected"] == 1
        assert receiver._reservations.kept_bytes
    finally:
        control.close()


# A scheduler's end.


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


def test_taking_never_waits(receiver, claims):
    claims.connect(PATIENCE_S)
    claims.claim("r", EXPECT)
    assert claims.take() == []


def test_the_items_of_what_was_abandoned_too_late_can_be_given_back(receiver, encoder, claims):
    arena = claims.connect(PATIENCE_S)
    claims.claim("r", EXPECT)
    encoder.deliver(encoder.grant())
    claims.abandon("r")  # it has settled, though nobody has looked
    assert claims.socket.poll(PATIENCE_S * 1e3)
    (settled,) = claims.take()
    for item in settled.items:
        arena.drop(item.slot, 0)
    reached(lambda: not receiver._reservations.held_bytes)


def test_claims_beside_their_receiver_need_no_socket_of_the_system(receiver, control_path):
    control_path.unlink()
    for _ in range(2):
        claims = Claims(control_path)
        claims.connect(PATIENCE_S)
        claims.close()


def test_a_claim_says_who_will_read(router, control_path):
    claims = Claims(control_path, first_reader=3, readers=2)
    claims.claim("r", EXPECT)
    assert answer(router) == wire.Claim("r", EXPECT, 3, 2)
    claims.close()


def test_claims_made_before_there_is_a_receiver_wait_for_it(control_path, start_receiver, connect):
    control_path.parent.mkdir()
    claims = Claims(control_path)
    for number in range(2000):
        claims.claim(f"r{number}", wire.Expect(f"t{number}", 1, 1e-3))
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


def test_nothing_of_claims_is_left_after_close(receiver, control_path, remember):
    def live_once():
        claims = Claims(control_path)
        claims.connect(PATIENCE_S)
        claims.close()

    live_once()
    no_more = remember()
    for _ in range(5):
        live_once()
    reached(no_more)
