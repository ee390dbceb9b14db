from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import torch
import zmq
import zmq.asyncio

from sglang_epd.errors import (
    DeadlineError,
    EncodeError,
    ProtocolError,
    UnavailableError,
    UnreachableError,
)
from sglang_epd.transfer import host
from sglang_epd.transfer import sender as sender_module
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.delivery import Granted, GrantLostError
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire import messages as wire
from transfer.conftest import BUDGET, FULL, PATIENCE_S, SlowWriter
from waiting import until

LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("bfloat16", (2, 4)), [[1, 2, 4]])
EMBEDDING = torch.arange(8, dtype=torch.float32).reshape(2, 4).to(torch.bfloat16)
INLINE = wire.Grant("t", 0, 7, 30.0, wire.Inline())


def offer(item: int = 0, ticket: str = "t") -> wire.Offer:
    return wire.Offer(ticket, item, b"k" * 32, LAYOUT, nbytes=16)


def granted(grant: wire.Grant = INLINE) -> Granted:
    return Granted(grant, time.monotonic() + grant.ttl_s, 16)


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    sender = Sender()
    yield sender
    await sender.close()


class Router:
    """A receiver that answers what the test wants."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = b""
        self.frames: list[bytes] = []

    async def receive(self) -> wire.Message:
        """The next message; what came with it is in `frames`."""
        received = await asyncio.wait_for(self._socket.recv_multipart(), PATIENCE_S)
        self.peer, head, *self.frames = received
        return wire.decode_message(head)

    async def say(self, *answers: wire.Message | bytes) -> None:
        for answer in answers:
            frame = wire.encode_message(answer) if isinstance(answer, wire.Message) else answer
            await self._socket.send_multipart([self.peer, frame])

    async def silent(self) -> bool:
        return not await self._socket.poll(50)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    yield router
    router.close()


@pytest.fixture
def deaf_endpoint():
    """An address at which nobody answers: connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port() -> Iterator[socket.socket]:
    """A port of which nothing is heard, and that nothing else takes."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved


async def test_offers_to_a_port_that_cannot_be_connected_to_fail_until_it_can(closed_port, caplog):
    sender = Sender(reach_s=1.5)
    port = closed_port.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    router = None
    try:
        first = sender._peer(endpoint).socket
        with pytest.raises(UnreachableError, match=r"cannot connect .* at 127"):
            async with sender.offer(endpoint, offer()) as offered:
                await asyncio.wait_for(offered.decided, PATIENCE_S)
        with pytest.raises(UnreachableError):
            async with sender.offer(endpoint, offer()):
                pytest.fail("it is offered")
        assert caplog.text.count("cannot connect") == 1
        assert sender._peer(f"tcp://secret@127.0.0.1:{port}").place == f"127.0.0.1:{port}"
        await until(lambda: first.closed)
        await asyncio.sleep(0.2)  # libzmq closes it in a thread of its own
        router = Router(port)
        await until(lambda: sender._peer(endpoint).out_of_reach is None)
        async with sender.offer(endpoint, offer(1)) as offered:
            assert (await router.receive()).item == 1, "the offer that failed is not sent late"
            await asyncio.sleep(2.0)
            assert not offered.decided.done(), "a server that says nothing has its time"
    finally:
        await sender.close()
        if router is not None:
            router.close()


async def test_a_port_behind_a_proxy_that_takes_all_connections_is_out_of_reach():
    """One after the other: each is ended as the port itself is not to be had."""
    ended = 0

    async def end(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal ended
        ended += 1
        writer.close()

    proxy = await asyncio.start_server(end, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    sender = Sender(reach_s=1.0)
    try:
        with pytest.raises(UnreachableError):
            async with sender.offer(endpoint, offer()) as offered:
                await asyncio.wait_for(offered.decided, PATIENCE_S)
        assert ended > 1
    finally:
        await sender.close()
        proxy.close()


async def deliver(sender: Sender, endpoint: str, item: int = 0, ticket: str = "t") -> str:
    async with sender.offer(endpoint, offer(item, ticket)) as offered:
        decision = await asyncio.wait_for(offered.decided, PATIENCE_S)
        assert isinstance(decision, Granted), decision
        return await sender.deliver(endpoint, decision, EMBEDDING + item, PATIENCE_S)


# With a receiver.


@pytest.mark.parametrize("share_memory", [False, True])
async def test_one_sender_delivers_many_items_at_once(receiver, scheduler, share_memory):
    sender = Sender(share_memory=share_memory)
    scheduler.expecting(items=20)
    try:
        await asyncio.gather(*(deliver(sender, receiver.endpoint, item) for item in range(20)))
    finally:
        await sender.close()
    tensors = await asyncio.to_thread(scheduler.tensors)
    assert all(torch.equal(tensor, EMBEDDING + item) for item, tensor in enumerate(tensors))


async def test_the_place_of_an_item_is_mapped_while_the_item_is_being_made(
    receiver, sender, scheduler
):
    scheduler.expecting()
    async with sender.offer(receiver.endpoint, wire.Offer("t", 0, bytes(32), FULL, BUDGET)):
        await until(lambda: os.stat(receiver._arena.address.path).st_blocks * 512 >= BUDGET)


async def test_a_large_item_goes_in_chunks(start_receiver, connect_scheduler):
    receiver = start_receiver(budget_bytes=4 << 20)
    scheduler = await asyncio.to_thread(connect_scheduler)
    scheduler.expecting()
    embedding = torch.arange(3 << 18, dtype=torch.float32).reshape(-1, 4)[: -(1 << 10)]
    layout = wire.Layout("IMAGE", wire.TensorSpec("float32", tuple(embedding.shape)), [[1, 2, 4]])
    sender = Sender(share_memory=False)
    try:
        large = wire.Offer("t", 0, bytes(32), layout, embedding.nbytes)
        async with sender.offer(receiver.endpoint, large) as offered:
            decision = await offered.decided
            way = await sender.deliver(receiver.endpoint, decision, embedding, PATIENCE_S)
    finally:
        await sender.close()
    assert way == "inline"
    assert torch.equal((await asyncio.to_thread(scheduler.tensors))[0], embedding)


async def test_an_offer_that_has_to_wait_says_so_first(receiver, connect, sender, scheduler):
    scheduler.expecting("a", "a")
    scheduler.expecting()
    other = connect(receiver)
    grant = await asyncio.to_thread(lambda: other.grant("a", layout=FULL))
    async with sender.offer(receiver.endpoint, offer()) as offered:
        assert not offered.waits, "nothing is known yet"
        assert await offered.answered
        assert offered.waits
        assert offered.granted is None
        other.send(wire.Withdraw("a", 0, grant.grant))
        decision = await offered.decided
        assert offered.granted is decision
        assert not offered.waits
        await sender.deliver(receiver.endpoint, decision, EMBEDDING, PATIENCE_S)
    assert torch.equal((await asyncio.to_thread(scheduler.tensors))[0], EMBEDDING)


async def test_a_sender_that_was_cancelled_while_it_waited_gives_its_grant_back(
    receiver, sender, connect, scheduler
):
    scheduler.expecting("a", "a")
    scheduler.expecting()
    other = connect(receiver)
    grant = await asyncio.to_thread(lambda: other.grant("a", layout=FULL))
    delivery = asyncio.create_task(deliver(sender, receiver.endpoint))
    await until(lambda: receiver.tally.counts["waits", ""])
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    other.send(wire.Withdraw("a", 0, grant.grant))
    await until(lambda: receiver.tally.counts["withdrawals", ""] == 2)
    assert receiver._reservations.held_bytes == 0


async def test_an_expired_grant_is_not_used_and_given_back(receiver, sender, scheduler):
    scheduler.expecting()
    async with sender.offer(receiver.endpoint, offer()) as offered:
        decision = await offered.decided
        decision.until = time.monotonic()
        with pytest.raises(GrantLostError):
            await sender.deliver(receiver.endpoint, decision, EMBEDDING, PATIENCE_S)
    await until(lambda: not receiver._reservations.held_bytes)
    assert receiver.tally.counts["withdrawals", ""] == 1


async def test_an_expired_grant_is_given_back_before_its_item_is_made(router, sender):
    question = wire.Grant("t", 0, 7, 0.0, wire.Inline())
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        await router.say(INLINE, question)
        decision = await offered.decided
        assert await router.silent(), "it may be used yet"
        decision.until = time.monotonic()
        await router.say(question)
        assert await router.receive() == wire.Withdraw("t", 0, 7)
        with pytest.raises(GrantLostError):
            await sender.deliver(router.endpoint, decision, EMBEDDING, PATIENCE_S)


async def test_a_grant_that_expires_after_the_first_rows_is_given_back(router, sender):
    question = wire.Grant("t", 0, 7, 0.0, wire.Inline())
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        await router.say(INLINE)
        decision = await offered.decided
        await sender.begin(router.endpoint, decision, EMBEDDING, 1, PATIENCE_S)
        while not isinstance(await router.receive(), wire.Payload):
            pass
        await router.say(question)
        decision.until = time.monotonic()
        await router.say(question)
        while await router.receive() != wire.Withdraw("t", 0, 7):
            pass


async def test_an_embedding_of_another_size_is_not_written(receiver, sender, scheduler):
    """Beside its place in the receiver's memory lies somebody else's item."""
    scheduler.expecting()
    async with sender.offer(receiver.endpoint, offer()) as offered:
        decision = await offered.decided
        for wrong in (EMBEDDING[:1], EMBEDDING.repeat(1000, 1)):
            with pytest.raises(EncodeError, match="16 were offered"):
                await sender.deliver(receiver.endpoint, decision, wrong, PATIENCE_S)
    assert not receiver._arena.data.any()
    await until(lambda: not receiver._reservations.held_bytes)


async def test_without_shared_memory_it_goes_over_the_socket(
    receiver, sender, scheduler, monkeypatch, caplog
):
    scheduler.expecting(items=3)

    def refuse(_address):
        raise PermissionError("not here")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "open", refuse)
        assert await deliver(sender, receiver.endpoint, 0) == "inline"
    assert "no shared memory" in caplog.text
    assert await deliver(sender, receiver.endpoint, 1) == "inline", "it is not tried again"
    assert receiver.tally.counts["payloads", "inline"] == 2
    await deliver(sender, receiver.endpoint, 2)
    tensors = await asyncio.to_thread(scheduler.tensors)
    assert torch.equal(tensors[1], EMBEDDING + 1)


async def test_shared_memory_is_tried_again_after_a_while(receiver, sender, scheduler, monkeypatch):
    scheduler.expecting(items=2)
    monkeypatch.setattr(sender_module, "_ANOTHER_WAY_S", 0.0)

    def refuse(_address):
        raise OSError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "open", refuse)
        assert await deliver(sender, receiver.endpoint, 0) == "inline"
    assert await deliver(sender, receiver.endpoint, 1) == "shared"


async def test_a_message_that_cannot_be_acted_upon_stops_no_later_one(
    receiver, sender, scheduler, monkeypatch, caplog
):
    scheduler.expecting(items=2)

    def no_thread(*_args):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(sender, "_prepare", no_thread)
        await deliver(sender, receiver.endpoint, 0)
    await asyncio.wait_for(deliver(sender, receiver.endpoint, 1), PATIENCE_S)
    assert "Could not act upon a message" in caplog.text


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["in a thread", "here"])
async def test_a_write_that_fails_in_an_unforeseen_way_gives_its_memory_back(
    receiver, scheduler, monkeypatch, small_bytes
):
    sender = Sender()
    monkeypatch.setattr(sender_module, "_SMALL_BYTES", small_bytes)

    def fails(_landing, _raw):
        raise ValueError("unforeseen")

    monkeypatch.setattr(sender._shared, "write", fails)
    scheduler.expecting()
    with pytest.raises(ValueError, match="unforeseen"):
        await deliver(sender, receiver.endpoint)
    await until(lambda: not receiver._reservations.held_bytes)
    (peer,) = sender._peers.values()
    assert not peer.grants
    await sender.close()


async def test_language_servers_in_great_number_can_be_dialled(sender):
    assert sender._context.get(zmq.MAX_SOCKETS) > 3 * 1000


async def test_one_receivers_memory_out_of_reach_says_nothing_of_anothers(
    receiver, sender, scheduler, router
):
    offering = asyncio.create_task(deliver(sender, router.endpoint))
    await router.receive()
    gone = wire.Shared("/proc/1/fd/999999", 1, bytes(32), 0)
    await router.say(wire.Grant("t", 0, 7, 30.0, gone))
    assert await router.receive() == wire.Payload("t", 0, 7)
    assert len(router.frames) == 1
    await router.say(wire.Ack("t", 0, 7))
    assert await offering == "inline"
    scheduler.expecting()
    assert await deliver(sender, receiver.endpoint) == "shared"


async def test_a_small_payload_is_copied_without_a_thread(receiver, sender, scheduler):
    scheduler.expecting()
    sender._sharing.shutdown()
    assert await deliver(sender, receiver.endpoint) == "shared"


async def test_a_cancelled_delivery_gives_its_memory_back_when_the_write_has_ended(
    receiver, sender, scheduler, monkeypatch
):
    scheduler.expecting()
    slow = SlowWriter(sender, monkeypatch)
    delivery = asyncio.create_task(deliver(sender, receiver.endpoint))
    await until(slow.writing.is_set)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    await asyncio.sleep(0.05)
    assert receiver._reservations.held_bytes, "it is still being written to"
    slow.go_on.set()
    await until(lambda: not receiver._reservations.held_bytes)
    assert receiver.tally.counts["withdrawals", ""] == 1


class FailingEngine:
    """Fails at every write, of which it says whether it is done with it."""

    engine_name = "cards"

    def __init__(self, ended: Callable[[], bool] | None) -> None:
        self._ended = ended

    def write(self, *_):
        raise self._error()

    def _error(self) -> UnavailableError:
        error = UnavailableError("the card is gone")
        error.ended = self._ended
        return error


async def fail_to_deliver(sender: Sender, router: Router) -> None:
    delivery = asyncio.create_task(deliver(sender, router.endpoint))
    asked = await router.receive()
    assert asked.engine == "cards"
    await router.say(wire.Grant("t", 0, 7, 30.0, wire.Remote("there:1", 0)))
    with pytest.raises(UnavailableError, match="card"):
        await delivery


async def test_after_a_failed_write_payloads_go_without_the_engine_for_a_while(router):
    """Or each would be made, and lost, where a network card is broken."""
    sender = Sender(remote=FailingEngine(None))
    try:
        await fail_to_deliver(sender, router)
        assert await router.receive() == wire.Withdraw("t", 0, 7)
        again = asyncio.create_task(deliver(sender, router.endpoint))
        assert (await router.receive()).engine == ""
        await router.say(INLINE)
        await router.receive()
        await router.say(wire.Ack("t", 0, 7))
        assert await again == "inline"
        sender._peer(router.endpoint).engine_from = time.monotonic()
        await fail_to_deliver(sender, router)
    finally:
        await sender.close()


async def test_a_remote_write_that_failed_keeps_its_memory_until_the_engine_is_done(router):
    done = threading.Event()
    sender = Sender(remote=FailingEngine(done.is_set))
    question = wire.Grant("t", 0, 7, 0.0, wire.Inline())
    try:
        await fail_to_deliver(sender, router)
        await router.say(question)
        assert await router.silent(), "part of it may yet be written"
        done.set()
        await router.say(question)
        assert await router.receive() == wire.Withdraw("t", 0, 7)
    finally:
        await sender.close()


async def test_a_write_outlives_the_connection_that_it_was_granted_on(router):
    """One that a server refused for a while, for instance."""
    done = threading.Event()
    sender = Sender(remote=FailingEngine(done.is_set))
    question = wire.Grant("t", 0, 7, 0.0, wire.Inline())
    try:
        await fail_to_deliver(sender, router)
        await sender._close_peer(router.endpoint)
        await sender.close_unused()
        async with sender.offer(router.endpoint, offer(1)):
            await router.receive()
            await router.say(question)
            assert await router.silent()
            done.set()
            await router.say(question)
            assert await router.receive() == wire.Withdraw("t", 0, 7)
        await sender._close_peer(router.endpoint)
        await sender.close_unused()
        assert not sender._grants
    finally:
        await sender.close()


async def test_a_write_that_ends_later_is_told_of_on_the_connection_that_there_is(router):
    engine = FreezingEngine()
    sender = Sender(remote=engine)
    grant = wire.Grant("t", 0, 7, 30.0, wire.Remote("frozen", 0))
    try:
        delivery = asyncio.create_task(
            sender.deliver(router.endpoint, granted(grant), EMBEDDING.clone(), PATIENCE_S)
        )
        await until(lambda: engine.begun)
        delivery.cancel()
        await asyncio.wait([delivery])
        await sender._close_peer(router.endpoint)
        async with sender.offer(router.endpoint, offer(1)):
            assert (await router.receive()).item == 1
            engine.thaw.set()
            assert await router.receive() == wire.Withdraw("t", 0, 7)
    finally:
        engine.thaw.set()
        await sender.close()


async def test_a_remote_write_that_was_not_begun_gives_its_memory_back(router):
    sender = Sender(remote=FailingEngine(None))
    try:
        await fail_to_deliver(sender, router)
        assert await router.receive() == wire.Withdraw("t", 0, 7)
    finally:
        await sender.close()


class FreezingEngine:
    """Writes at once, but to the session "frozen": not before `thaw`, and not in time.

    Attributes:
        begun: sessions, and the seconds that each write had.
    """

    engine_name = "cards"

    def __init__(self) -> None:
        self.thaw = threading.Event()
        self.begun: list[tuple[str, float]] = []

    def write(self, landing: wire.Remote, _payload: object, timeout_s: float) -> None:
        self.begun.append((landing.session, timeout_s))
        if landing.session == "frozen":
            self.thaw.wait(PATIENCE_S)
            raise UnavailableError("no answer in time")


async def test_writes_to_a_frozen_receiver_hold_up_no_other_and_end_at_their_deadline(
    router, deaf_endpoint
):
    engine = FreezingEngine()
    sender = Sender(remote=engine)

    def write(endpoint: str, item: int, session: str, timeout_s: float) -> asyncio.Task[str]:
        grant = wire.Grant("t", item, 7, 30.0, wire.Remote(session, 0))
        return asyncio.create_task(
            sender.deliver(endpoint, granted(grant), EMBEDDING.clone(), timeout_s)
        )

    frozen = [write(deaf_endpoint, item, "frozen", 0.2) for item in range(20)]
    try:
        await until(lambda: len(engine.begun) == 4)
        good = write(router.endpoint, 0, "there", PATIENCE_S)
        await router.receive()
        await router.say(wire.Ack("t", 0, 7))
        assert await good == "remote"
        errors = await asyncio.gather(*frozen, return_exceptions=True)
        assert {type(error) for error in errors} == {DeadlineError}
        engine.thaw.set()
        last = write(deaf_endpoint, 20, "alive", 0.5)
        await until(lambda: len(engine.begun) == 6)
        await asyncio.wait([last])
        assert [session for session, _ in engine.begun[4:]] == ["there", "alive"]
    finally:
        engine.thaw.set()
        await sender.close()


async def test_a_remote_write_does_not_begin_once_its_grant_is_over(router):
    """It may have waited for a thread for as long as its memory was kept."""
    engine = FreezingEngine()
    sender = Sender(remote=engine)

    def write(item: int, until: float) -> asyncio.Task[str]:
        grant = granted(wire.Grant("t", item, 7, until, wire.Remote("frozen", 0)))
        return asyncio.create_task(
            sender.deliver(router.endpoint, grant, EMBEDDING.clone(), PATIENCE_S)
        )

    try:
        before = [write(item, 30.0) for item in range(4)]
        await until(lambda: len(engine.begun) == 4)
        late = write(4, 0.1)
        await asyncio.sleep(0.2)
        engine.thaw.set()
        errors = await asyncio.gather(*before, late, return_exceptions=True)
        assert [type(error) for error in errors] == [UnavailableError] * 4 + [GrantLostError]
        assert len(engine.begun) == 4
        told = [await router.receive() for _ in range(5)]
        assert wire.Withdraw("t", 4, 7) in told
    finally:
        engine.thaw.set()
        await sender.close()


async def test_the_payload_of_a_remote_write_that_failed_is_gone_with_its_delivery(router):
    """Without waiting for a collection of cycles."""
    sender = Sender(remote=FailingEngine(None))
    gc.disable()
    try:
        grant = wire.Grant("t", 0, 7, 30.0, wire.Remote("there:1", 0))
        embedding = EMBEDDING.clone()
        payload = weakref.ref(embedding)
        delivery = sender.deliver(router.endpoint, granted(grant), embedding, PATIENCE_S)
        del embedding
        (error,) = await asyncio.gather(delivery, return_exceptions=True)
        assert isinstance(error, UnavailableError)
        del delivery, error
        await until(lambda: payload() is None)
    finally:
        gc.enable()
        await sender.close()


async def test_the_payload_of_a_delivery_that_was_cut_off_is_gone_with_it(router, sender):
    """Without waiting for a collection of cycles."""
    gc.disable()
    try:
        embedding = EMBEDDING.clone()
        payload = weakref.ref(embedding)
        delivery = sender.deliver(router.endpoint, granted(), embedding, PATIENCE_S)
        cut_off = asyncio.create_task(delivery)
        del embedding, delivery
        await router.receive()
        router.close()
        await asyncio.wait([cut_off])
        assert isinstance(cut_off.exception(), GrantLostError)
        del cut_off
        await until(lambda: payload() is None)
    finally:
        gc.enable()


async def test_a_receiver_that_dies_after_its_grant_costs_the_deadline_at_most(
    control_path, sender
):
    receiver = Receiver("127.0.0.1", "127.0.0.1", control_path, budget_bytes=BUDGET)
    receiver._ledger.expect(wire.Expect("t", 1, 60.0), time.monotonic())
    receiver.start()
    async with sender.offer(receiver.endpoint, offer()) as offered:
        decision = await offered.decided
        await asyncio.to_thread(receiver.stop)
        started = time.monotonic()
        # The break of the connection is noticed before the payload is sent, or after it.
        with pytest.raises((DeadlineError, GrantLostError)):
            await sender.deliver(receiver.endpoint, decision, EMBEDDING, 0.1)
    assert time.monotonic() - started < PATIENCE_S


# With a receiver that does what the test wants.


async def test_an_offer_says_what_its_encoder_can_do(sender, router):
    async with sender.offer(router.endpoint, offer()):
        asked = await router.receive()
    assert asked == wire.Offer("t", 0, b"k" * 32, LAYOUT, 16, host.this_process())
    alone = Sender(share_memory=False)
    async with alone.offer(router.endpoint, offer()):
        assert await router.receive() == offer()
    await alone.close()


async def test_a_grant_that_comes_when_nobody_waits_is_given_back(sender, router):
    async with sender.offer(router.endpoint, offer()):
        await router.receive()
        await router.say(wire.Wait("t", 0))
    await router.say(INLINE)
    assert await router.receive() == wire.Withdraw("t", 0, 7)


@pytest.mark.parametrize(
    ("more", "withdrawn"),
    [
        (wire.Grant("t", 0, 8, 30.0, wire.Inline()), [8, 7]),
        (INLINE, [7]),
        (wire.Grant("t", 0, 7, 0.0, wire.Inline()), [7]),  # a question whether it is used
        (wire.Grant("t", 0, 6, 0.0, wire.Inline()), [6, 7]),
    ],
    ids=["another", "the same", "a question about it", "a question about another"],
)
async def test_of_grants_that_come_twice_all_but_the_first_are_given_back(
    sender, router, more, withdrawn
):
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        await router.say(INLINE, more)
        assert (await offered.decided).message == INLINE
        for grant in withdrawn[:-1]:
            assert await router.receive() == wire.Withdraw("t", 0, grant)
        assert await router.silent()
    assert await router.receive() == wire.Withdraw("t", 0, withdrawn[-1])


async def test_a_question_about_a_grant_that_nobody_knows_is_answered_and_no_answer(sender, router):
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        await router.say(wire.Grant("t", 0, 6, 0.0, wire.Inline()))
        assert await router.receive() == wire.Withdraw("t", 0, 6)
        assert not offered.decided.done()
        await router.say(INLINE)
        assert (await offered.decided).message == INLINE


async def test_what_is_no_answer_is_passed_over(sender, router):
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        await router.say(
            b"",
            b"garbage",
            wire.Hello(),
            wire.Cancel("t"),
            wire.Ack("t", 0, 7),
            wire.Decline("another", 0, "unknown"),
            wire.Decline("t", 1, "unknown"),
            INLINE,
        )
        assert (await offered.decided).message == INLINE


async def test_an_ack_of_another_grant_is_no_answer(sender, router):
    delivery = asyncio.create_task(
        sender.deliver(router.endpoint, granted(), EMBEDDING, PATIENCE_S)
    )
    await router.receive()
    others = (wire.Ack("t", 0, 8), wire.Ack("t", 1, 7), wire.Ack("another", 0, 7))
    await router.say(*others, INLINE, wire.Ack("t", 0, 7), wire.Ack("t", 0, 7, "malformed"))
    assert await delivery == "inline"


@pytest.mark.parametrize(
    ("error", "raised"),
    [(wire.ACK_NOT_GRANTED, GrantLostError), (wire.ACK_MALFORMED, EncodeError)],
)
async def test_a_dropped_payload_is_an_error_that_says_why(sender, router, error, raised):
    delivery = asyncio.create_task(
        sender.deliver(router.endpoint, granted(), EMBEDDING, PATIENCE_S)
    )
    await router.receive()
    await router.say(wire.Ack("t", 0, 7, error))
    with pytest.raises(raised):
        await delivery


@pytest.mark.parametrize("renewal", [False, True])
async def test_a_payload_that_lost_frames_is_offered_once_again(sender, router, renewal):
    """libzmq connects anew by itself, and goes on with what it has not sent."""
    again = msgspec.structs.replace(offer(), renewal=renewal)
    async with sender.offer(router.endpoint, again):
        await router.receive()
        delivery = asyncio.create_task(
            sender.deliver(router.endpoint, granted(), EMBEDDING, PATIENCE_S)
        )
        await router.receive()
        await router.say(wire.Ack("t", 0, 7, wire.ACK_MALFORMED))
        with pytest.raises(EncodeError if renewal else GrantLostError):
            await delivery


async def test_a_landing_that_was_not_offered_is_refused(sender, router):
    grant = wire.Grant("t", 0, 7, 30.0, wire.Remote("there:1", 0))
    with pytest.raises(EncodeError, match="did not offer"):
        await sender.deliver(router.endpoint, granted(grant), EMBEDDING, PATIENCE_S)


async def test_a_silent_receiver_costs_the_deadline_and_no_more(sender, deaf_endpoint):
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with sender.offer(deaf_endpoint, offer()) as offered, asyncio.timeout(0.1):
            await offered.decided
    with pytest.raises(DeadlineError):
        await sender.deliver(deaf_endpoint, granted(), EMBEDDING, 0.1)
    assert 0.2 <= time.monotonic() - started < PATIENCE_S


async def test_a_peer_that_reads_nothing_costs_the_deadline(sender, deaf_endpoint):
    """Chunks pile up until no more are taken."""
    large = torch.zeros(1 << 18, 4 * 64)
    with pytest.raises(DeadlineError):
        offered = Granted(INLINE, time.monotonic() + PATIENCE_S, large.nbytes)
        await sender.deliver(deaf_endpoint, offered, large, 0.3)


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "ipc:///tmp/control", "inproc://x", "udp://127.0.0.1:1"]
)
async def test_only_tcp_endpoints_are_dialled(sender, endpoint):
    with pytest.raises(ProtocolError, match="tcp"):
        async with sender.offer(endpoint, offer()):
            pass


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:port"])
async def test_an_endpoint_that_cannot_be_dialled_is_unavailable(sender, endpoint):
    with pytest.raises(UnavailableError, match="dial"):
        async with sender.offer(endpoint, offer()):
            pass


async def test_an_item_has_one_offer_open(sender, router):
    async with sender.offer(router.endpoint, offer()) as offered:
        with pytest.raises(UnavailableError, match="open already"):
            async with sender.offer(router.endpoint, offer()):
                pass
        await router.receive()
        await router.say(INLINE)
        assert (await offered.decided).message == INLINE, "the first is as it was"
    async with sender.offer(router.endpoint, offer()):
        pass


async def test_closing_ends_the_open_questions_at_once(router):
    sender = Sender()

    async def ask(item: int) -> object:
        async with sender.offer(router.endpoint, offer(item)) as offered:
            return await offered.decided

    asked = [asyncio.create_task(ask(item)) for item in range(2)]
    asked.append(
        asyncio.create_task(sender.deliver(router.endpoint, granted(), EMBEDDING, PATIENCE_S))
    )
    for _ in asked:
        await router.receive()
    started = time.monotonic()
    await sender.close()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 3
    assert time.monotonic() - started < PATIENCE_S / 2


async def test_unused_connections_are_closed_and_used_ones_are_not(sender, router, monkeypatch):
    monkeypatch.setattr(sender_module, "_UNUSED_S", -1.0)
    async with sender.offer(router.endpoint, offer()) as offered:
        await router.receive()
        first = router.peer
        await sender.close_unused()
        await router.say(wire.Decline("t", 0, "unknown"))
        await offered.decided
    await sender.close_unused()
    assert router.endpoint not in sender._peers
    async with sender.offer(router.endpoint, offer()):
        await router.receive()
    assert router.peer == first, "asked by this name about what it wrote before"


async def test_nothing_is_left_after_close(receiver, remember, scheduler):
    # Sharing brings threads that start with the first write and end with the sender.
    async def live_once(number: int) -> None:
        await asyncio.to_thread(scheduler.expecting, f"r{number}", f"t{number}")
        sender = Sender()
        await deliver(sender, receiver.endpoint, ticket=f"t{number}")
        await sender.close()
        await asyncio.to_thread(scheduler.tensors)

    await live_once(0)
    await until(lambda: not any(one.name.startswith("epd-share") for one in threading.enumerate()))
    tasks, no_more = len(asyncio.all_tasks()), remember()
    for number in range(1, 6):
        await live_once(number)
    assert len(asyncio.all_tasks()) == tasks
    await until(no_more)
    await until(lambda: not receiver._reservations.held_bytes)
