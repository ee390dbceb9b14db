from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
import torch
import zmq
import zmq.asyncio

from sglang_epd import wire
from sglang_epd.errors import DeadlineError, ProtocolError, UnavailableError
from sglang_epd.transfer import sender as sender_module
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire import messages

LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("bfloat16", (2, 4)), [[1, 2, 4]])
EMBEDDING = torch.arange(8, dtype=torch.float32).reshape(2, 4).to(torch.bfloat16)
PATIENCE_S = 5.0


def offer(item: int = 0) -> wire.Offer:
    return wire.Offer("t", item, b"k" * 32, LAYOUT, nbytes=16)


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    sender = Sender()
    yield sender
    await sender.close()


class Router:
    """A receiver that answers what the test wants."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def receive(self) -> tuple[bytes, wire.Message]:
        peer, head, *_ = await asyncio.wait_for(self._socket.recv_multipart(), PATIENCE_S)
        return peer, wire.decode_message(head)

    async def answer(self, *answers: wire.Message | bytes) -> None:
        peer, _ = await self.receive()
        for answer in answers:
            frame = wire.encode_message(answer) if isinstance(answer, wire.Message) else answer
            await self._socket.send_multipart([peer, frame])

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


async def deliver(sender: Sender, endpoint: str, item: int = 0) -> None:
    granted = await sender.offer(endpoint, offer(item), PATIENCE_S)
    assert isinstance(granted, wire.Grant)
    payload = wire.Payload("t", item, granted.grant)
    await sender.deliver(endpoint, payload, EMBEDDING + item, PATIENCE_S)


async def test_two_senders_deliver_side_by_side(receiver, sender, settle):
    receiver.claim("r", wire.Expect("t", 2, 1, 60.0))
    other = Sender()
    try:
        await asyncio.gather(
            deliver(sender, receiver.endpoint, 0), deliver(other, receiver.endpoint, 1)
        )
    finally:
        await other.close()
    (settled,) = settle(1)
    assert [item.embedding.tolist() for item in settled.items] == [
        EMBEDDING.tolist(),
        (EMBEDDING + 1).tolist(),
    ]
    assert all(item.embedding.dtype is torch.bfloat16 for item in settled.items)


async def test_one_sender_delivers_many_items_at_once(receiver, sender, settle):
    receiver.claim("r", wire.Expect("t", 20, 1, 60.0))
    await asyncio.gather(*(deliver(sender, receiver.endpoint, item) for item in range(20)))
    (settled,) = settle(1)
    assert all(
        torch.equal(item.embedding, EMBEDDING + number) for number, item in enumerate(settled.items)
    )


async def test_a_decline_comes_back(receiver, sender):
    answer = await sender.offer(receiver.endpoint, offer(), PATIENCE_S)
    assert answer == wire.Decline("t", 0, messages.DECLINE_UNKNOWN)


async def test_a_dropped_payload_is_an_error_that_says_why(receiver, sender):
    with pytest.raises(ProtocolError, match="no such grant"):
        await sender.deliver(receiver.endpoint, wire.Payload("t", 0, 1), EMBEDDING, PATIENCE_S)


async def test_a_silent_receiver_costs_the_deadline_and_no_more(sender, deaf_endpoint):
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        await sender.offer(deaf_endpoint, offer(), 0.1)
    with pytest.raises(DeadlineError):
        await sender.deliver(deaf_endpoint, wire.Payload("t", 0, 1), EMBEDDING, 0.1)
    assert 0.2 <= time.monotonic() - started < 2


async def test_a_receiver_that_dies_after_its_grant_costs_the_deadline(control_path, sender):
    receiver = Receiver("127.0.0.1", "127.0.0.1", control_path)
    receiver.start()
    receiver.claim("r", wire.Expect("t", 1, 1, 60.0))
    granted = await sender.offer(receiver.endpoint, offer(), PATIENCE_S)
    receiver.stop()
    started = time.monotonic()
    with pytest.raises(DeadlineError):
        payload = wire.Payload("t", 0, granted.grant)
        await sender.deliver(receiver.endpoint, payload, EMBEDDING, 0.1)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "ipc:///tmp/control", "inproc://x", "udp://127.0.0.1:1"]
)
async def test_only_tcp_endpoints_are_dialled(sender, endpoint):
    with pytest.raises(ProtocolError, match="tcp"):
        await sender.offer(endpoint, offer(), PATIENCE_S)


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:port"])
async def test_an_endpoint_that_cannot_be_dialled_is_unavailable(sender, endpoint):
    with pytest.raises(UnavailableError, match="dial"):
        await sender.offer(endpoint, offer(), PATIENCE_S)


async def test_what_is_no_answer_is_passed_over(sender, router):
    grant = wire.Grant("t", 0, 7)
    asked = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    await router.answer(
        b"",
        b"garbage",
        wire.Hello(),
        wire.Cancel("t"),
        wire.Grant("another", 0, 1),
        wire.Grant("t", 1, 1),
        grant,
        wire.Grant("t", 0, 8),
    )
    assert await asked == grant


async def test_an_answer_to_another_question_is_an_error(sender, router):
    asked = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    await router.answer(wire.Ack("t", 0, 1))
    with pytest.raises(ProtocolError, match="acknowledged an offer"):
        await asked
    payload = wire.Payload("t", 0, 1)
    sent = asyncio.create_task(sender.deliver(router.endpoint, payload, EMBEDDING, PATIENCE_S))
    await router.answer(wire.Grant("t", 0, 1))
    with pytest.raises(ProtocolError, match="Grant to a payload"):
        await sent


async def test_an_item_has_one_question_open(sender, router):
    first = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    peer_and_offer = await router.receive()
    assert peer_and_offer[1] == offer()
    with pytest.raises(ProtocolError, match="open already"):
        await sender.offer(router.endpoint, offer(), PATIENCE_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_cancelled_question_may_be_asked_again(sender, router):
    first = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    await router.receive()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    await router.answer(wire.Grant("t", 0, 1))
    assert await again == wire.Grant("t", 0, 1)


async def test_closing_ends_the_open_questions_at_once(router):
    sender = Sender()
    asked = [
        asyncio.create_task(sender.offer(router.endpoint, offer(item), PATIENCE_S))
        for item in range(2)
    ]
    await router.receive()
    await router.receive()
    started = time.monotonic()
    await sender.close()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 2
    assert time.monotonic() - started < 1


async def test_unused_connections_are_closed_and_used_ones_are_not(sender, router, monkeypatch):
    monkeypatch.setattr(sender_module, "_UNUSED_S", -1.0)
    asked = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    peer, _ = await router.receive()
    await sender.close_unused()
    await router._socket.send_multipart([peer, wire.encode_message(wire.Grant("t", 0, 1))])
    assert await asked == wire.Grant("t", 0, 1)
    await sender.close_unused()
    again = asyncio.create_task(sender.offer(router.endpoint, offer(), PATIENCE_S))
    other_peer, _ = await router.receive()
    assert other_peer != peer, "a new connection"
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_nothing_is_left_after_close(receiver, resources):
    async def live_once():
        sender = Sender()
        await sender.offer(receiver.endpoint, offer(), PATIENCE_S)
        await sender.close()

    await live_once()
    tasks, before = len(asyncio.all_tasks()), resources()
    for _ in range(5):
        await live_once()
    assert len(asyncio.all_tasks()) == tasks
    # The receiver notices closed connections a moment later; ours are closed by now.
    after = resources()
    assert after[1] == before[1]
    assert after[0] - before[0] <= 5
