"""Connections that break between an encoder and a language server lose nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer import sender as sender_module
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire import messages as wire
from transfer.conftest import (
    BUDGET,
    EMBEDDING,
    FULL,
    LAYOUT,
    PATIENCE_S,
    Scheduler,
    SlowWriter,
    encode,
)
from transfer.links import Link
from transfer.receiver_process import receiver_process
from waiting import until

KEY = b"k" * 32
# After so long without a sign of life a connection is taken for broken.
DEAD_S = 0.4


@pytest.fixture(autouse=True)
def asked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "_ASK_S", 0.05)


@pytest.fixture
def link(receiver: Receiver) -> Iterator[Link]:
    link = Link(receiver.endpoint)
    yield link
    link.close()


@pytest.fixture(params=[False, True], ids=["inline", "shared"])
async def sender(request: pytest.FixtureRequest) -> AsyncIterator[Sender]:
    sender = Sender(share_memory=request.param, dead_s=DEAD_S)
    yield sender
    await sender.close()


async def encoded(sender: Sender, endpoint: str) -> str:
    offer = wire.Offer("t", 0, KEY, LAYOUT, EMBEDDING.nbytes)
    delivery = encode(sender, endpoint, offer, EMBEDDING, PATIENCE_S)
    return await asyncio.wait_for(delivery, PATIENCE_S)


async def nothing_held(receiver: Receiver) -> None:
    await until(lambda: not receiver._reservations.held_bytes)
    assert not receiver._reservations.quarantined
    assert not receiver._held


async def test_an_offer_that_waits_outlives_its_connection(
    receiver, link, sender, connect, scheduler
):
    scheduler.expecting("a", "a")
    scheduler.expecting()
    other = connect(receiver)
    grant = await asyncio.to_thread(lambda: other.grant("a", layout=FULL))
    waiting = asyncio.create_task(encoded(sender, link.endpoint))
    await until(lambda: receiver.tally.counts["waits", ""])
    link.cut()
    await until(lambda: receiver.tally.counts["waits", ""] == 2)
    other.send(wire.Withdraw("a", 0, grant.grant))
    assert await waiting in {"inline", "shared"}
    assert torch.equal((await asyncio.to_thread(scheduler.tensors))[0], EMBEDDING)
    await nothing_held(receiver)


@pytest.mark.parametrize("after", [False, True], ids=["lost", "arrived"])
@pytest.mark.parametrize("kind", ["offer", "grant", "payload", "ack"])
async def test_any_message_may_be_the_last_of_a_connection(
    receiver, link, sender, scheduler, kind, after
):
    scheduler.expecting()
    link.cut_at(kind, after=after)
    assert await encoded(sender, link.endpoint) in {"inline", "shared", "duplicate"}
    await until(lambda: link.cuts == 1)
    assert torch.equal((await asyncio.to_thread(scheduler.tensors))[0], EMBEDDING)
    await nothing_held(receiver)


async def test_a_grant_that_was_lost_with_its_connection_is_not_quarantined_for_good(
    receiver, link, sender, scheduler
):
    """Nobody offers the item again: its encoder has to be asked."""
    scheduler.expecting()
    link.cut_at("grant", after=False)
    asking = asyncio.create_task(encoded(sender, link.endpoint))
    await until(lambda: link.cuts)
    asking.cancel()
    await asyncio.wait([asking])
    await scheduler_abandons(scheduler)
    await nothing_held(receiver)


async def test_an_encoder_that_had_closed_its_connection_is_asked_on_the_next_one(
    receiver, link, connect, scheduler, monkeypatch
):
    """As after a language server stood still for minutes."""
    monkeypatch.setattr(sender_module, "_UNUSED_S", -1.0)
    sender, endpoint = Sender(dead_s=DEAD_S), link.endpoint
    try:
        scheduler.expecting("a", "a")
        scheduler.expecting()
        other = connect(receiver)
        full = await asyncio.to_thread(lambda: other.grant("a", layout=FULL))
        asking = asyncio.create_task(encoded(sender, endpoint))
        await until(lambda: receiver.tally.counts["waits", ""])
        link.lead_to("tcp://127.0.0.1:1")  # no other connection
        link.cut_at("grant", after=False)
        other.send(wire.Withdraw("a", 0, full.grant))
        await until(lambda: link.cuts)
        asking.cancel()
        await asyncio.wait([asking])
        await sender.close_unused()
        await scheduler_abandons(scheduler)
        assert len(receiver._reservations.quarantined) == 1
        link.lead_to(receiver.endpoint)
        scheduler.expecting("next", "next")
        offer = wire.Offer("next", 0, KEY, LAYOUT, EMBEDDING.nbytes)
        await encode(sender, endpoint, offer, EMBEDDING, PATIENCE_S)
        await until(lambda: not receiver._reservations.quarantined)
    finally:
        await sender.close()


async def scheduler_abandons(scheduler: Scheduler) -> None:
    scheduler.claims.abandon("r")
    assert (await asyncio.to_thread(scheduler.settle))[0].code == "RequestCancelledError"


async def test_an_encoder_that_writes_keeps_its_memory_when_it_is_asked(
    receiver, link, scheduler, monkeypatch
):
    sender = Sender(dead_s=DEAD_S)
    scheduler.expecting()
    slow = SlowWriter(sender, monkeypatch)
    delivery = asyncio.create_task(encoded(sender, link.endpoint))
    try:
        await until(slow.writing.is_set)
        await scheduler_abandons(scheduler)
        await until(lambda: link.seen["grant"] > 5)
        assert len(receiver._reservations.quarantined) == 1
        slow.go_on.set()
        assert await delivery == "cancelled"
        await nothing_held(receiver)
    finally:
        slow.go_on.set()
        await sender.close()


async def test_a_connection_that_the_receiver_takes_for_alive_is_taken_over(
    receiver, link, sender, scheduler
):
    """As where something between the two forgets a connection without a word."""
    full = wire.Offer("a", 0, bytes(32), FULL, BUDGET)
    scheduler.expecting("a", "a")
    scheduler.expecting()
    async with sender.offer(link.endpoint, full) as offered:
        await asyncio.wait_for(offered.decided, PATIENCE_S)
        waiting = asyncio.create_task(encoded(sender, link.endpoint))
        await until(lambda: receiver.tally.counts["waits", ""] == 1)
        link.strand()
        await until(lambda: receiver.tally.counts["waits", ""] >= 2)
    assert await waiting in {"inline", "shared"}
    assert torch.equal((await asyncio.to_thread(scheduler.tensors))[0], EMBEDDING)


async def test_the_receiver_closes_connections_of_hosts_that_are_gone(receiver, link, sender):
    """Such a host sends nothing any more, not even an end."""
    port = int(receiver.endpoint.rpartition(":")[2])

    def connections() -> set[int]:
        return {
            one.raddr.port
            for one in psutil.Process().net_connections("tcp")
            if one.laddr.port == port and one.raddr
        }

    await encoded(sender, link.endpoint)
    gone = connections()
    await asyncio.sleep(DEAD_S)  # a first sign of life says when the next is due
    assert gone == connections()
    link.strand()
    await until(lambda: not gone & connections())


async def test_a_receiver_that_was_started_again_says_so(receiver, link, sender, tmp_path):
    asking = asyncio.create_task(encoded(sender, link.endpoint))
    await until(lambda: receiver.tally.counts["offers", ""])
    other = Receiver("127.0.0.1", "127.0.0.1", tmp_path / "other" / "c", budget_bytes=BUDGET)
    other.start()
    try:
        link.lead_to(other.endpoint)
        link.cut()
        with pytest.raises(Exception, match="takes no payloads of us"):
            await asking
        assert await encoded(sender, link.endpoint) == "unknown"
    finally:
        await asyncio.to_thread(other.stop)


async def test_a_receiver_that_stands_still_for_longer_than_its_connections_live(
    tmp_path: Path, sender: Sender
):
    control = tmp_path / "c"
    with receiver_process(control) as process:
        scheduler = await asyncio.to_thread(Scheduler, control)
        scheduler.expecting("a", "a")
        scheduler.expecting()
        holder = Sender(dead_s=60.0)
        full = wire.Offer("a", 0, bytes(32), FULL, BUDGET)
        async with holder.offer(process.endpoint, full) as offered:
            await asyncio.wait_for(offered.decided, PATIENCE_S)
            asking = asyncio.create_task(encoded(sender, process.endpoint))
            await until(lambda: process.state()["waits"] == 1)
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(3 * DEAD_S)
            os.kill(process.pid, signal.SIGCONT)
            # Nothing but the connection has changed: it waits on, under a new one.
            await until(lambda: process.state()["waits"] == 2)
        assert await asking in {"inline", "shared"}
        await holder.close()
        (tensor,) = await asyncio.to_thread(scheduler.tensors)
        assert torch.equal(tensor, EMBEDDING)
        del tensor
        await until(lambda: not process.state()["held"])
        assert not process.state()["quarantined"]
        scheduler.close()
