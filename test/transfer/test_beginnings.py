"""An embedding's first rows are delivered while its others are being made."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator

import pytest
import torch

from integrity import claimed
from sglang_epd.transfer.delivery import Granted, GrantLostError
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter
from sglang_epd.wire import messages as wire
from transfer.conftest import EMBEDDING, LAYOUT, PATIENCE_S, Scheduler, SlowWriter
from transfer.links import Link
from transfer.test_mooncake import started
from waiting import until

ROWS = len(EMBEDDING)
OFFER = wire.Offer("t", 0, b"k" * 32, LAYOUT, EMBEDDING.nbytes)


class Copying:
    """A transfer engine whose remote writes are copies within this process."""

    name = "copying"
    session = "here:1"
    staged = False

    def register(self, address: int, nbytes: int) -> None:
        pass

    def contact(self, session: str, deadline: float) -> None:
        assert session == self.session

    def write(
        self, session: str, source: int, address: int, nbytes: int, timeout_s: float, *, keep=None
    ) -> None:
        assert session == self.session
        ctypes.memmove(address, source, nbytes)


@pytest.fixture(scope="module")
def mooncake() -> MooncakeEngine:
    """One that writes to itself: ending an engine takes a second."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_LOG_LEVEL", "ERROR")
        patch.setenv("MC_FORCE_TCP", "1")
        return started()


@pytest.fixture
def engine() -> Copying | MooncakeEngine:
    return Copying()


@pytest.fixture
def receiver(start_receiver, engine: Copying | MooncakeEngine) -> Receiver:
    return start_receiver(engine=engine)


@pytest.fixture(params=["inline", "shared", "remote"])
async def sender(
    request: pytest.FixtureRequest, engine: Copying | MooncakeEngine
) -> AsyncIterator[Sender]:
    remote = RemoteWriter(engine) if request.param == "remote" else None
    sender = Sender(remote, share_memory=request.param == "shared")
    sender.way = request.param  # type: ignore[attr-defined]
    yield sender
    await sender.close()


class TestByMooncake:
    @pytest.fixture
    def engine(self, mooncake: MooncakeEngine) -> MooncakeEngine:
        return mooncake

    @pytest.mark.parametrize("sender", ["remote"], indirect=True)
    async def test_the_first_row_is_read_before_the_second_is_made(self, receiver, sender, early):
        await two_rows(receiver, sender, early)


@pytest.fixture
def early(scheduler: Scheduler) -> Scheduler:
    scheduler.claims.claim("r", wire.Expect("t", 1, 60.0), early=True)
    scheduler.flush()
    return scheduler


async def first_row(early: Scheduler) -> torch.Tensor:
    """What a part reads that ends within the item."""
    (arrived,) = await asyncio.to_thread(early.settle)
    assert arrived == wire.Arrived("r", 0, 1, whole=False)
    early.claims.take_part("t", "r", "p", (0,), 0)
    (settled,) = await asyncio.to_thread(early.settle)
    assert settled.claim == "p"
    return early.arena.read(settled.items[0], 0)


async def grant(offered) -> Granted:
    decision = await asyncio.wait_for(offered.decided, PATIENCE_S)
    assert isinstance(decision, Granted)
    return decision


def unreachable(*_about: object) -> None:
    raise OSError("no access")


def made_so_far() -> torch.Tensor:
    made = torch.full_like(EMBEDDING, -1.0)
    made[0] = EMBEDDING[0]
    return made


async def test_the_first_row_is_read_before_the_second_is_made(receiver, sender, early):
    await two_rows(receiver, sender, early)


async def two_rows(receiver: Receiver, sender: Sender, early: Scheduler) -> None:
    made = made_so_far()
    async with sender.offer(receiver.endpoint, OFFER) as offered:
        decision = await grant(offered)
        await sender.begin(receiver.endpoint, decision, made, 1, PATIENCE_S)
        row = await first_row(early)
        assert torch.equal(row, EMBEDDING[:1])
        made[1] = EMBEDDING[1]
        way = await sender.deliver(receiver.endpoint, decision, made, PATIENCE_S)
    assert way == sender.way  # type: ignore[attr-defined]
    (whole,) = await asyncio.to_thread(early.tensors)
    assert torch.equal(whole, EMBEDDING)
    assert torch.equal(row, EMBEDDING[:1])
    assert not receiver.tally.counts["dropped", "payload"]


async def test_a_beginning_that_never_ends_leaves_nothing(receiver: Receiver, sender, early):
    """Its rows are nobody else's before the part that reads them has ended."""
    async with sender.offer(receiver.endpoint, OFFER) as offered:
        decision = await grant(offered)
        await sender.begin(receiver.endpoint, decision, made_so_far(), 1, PATIENCE_S)
        row = await first_row(early)
    reservations = receiver._reservations
    await until(lambda: receiver.tally.counts["withdrawals", ""])
    assert reservations.held_bytes
    assert torch.equal(row, EMBEDDING[:1])
    del row
    await until(lambda: not reservations.held_bytes)
    assert not reservations.quarantined


async def test_another_try_begins_at_the_beginning(receiver, sender, early):
    async with sender.offer(receiver.endpoint, OFFER) as offered:
        wrong = torch.full_like(EMBEDDING, 7.0)
        await sender.begin(receiver.endpoint, await grant(offered), wrong, 1, PATIENCE_S)
    async with sender.offer(receiver.endpoint, OFFER) as offered:
        decision = await grant(offered)
        await sender.begin(receiver.endpoint, decision, made_so_far(), 1, PATIENCE_S)
        await sender.deliver(receiver.endpoint, decision, EMBEDDING, PATIENCE_S)
    await until(lambda: not claimed(receiver._ledger))
    _, settled = await asyncio.to_thread(early.settle, 2)
    assert torch.equal(early.arena.read(settled.items[0], 0), EMBEDDING)


async def test_a_connection_that_breaks_between_loses_nothing(receiver, sender, early):
    """Frames may have been lost with it; what was written into memory was not."""
    link = Link(receiver.endpoint)
    made = made_so_far()
    try:
        async with sender.offer(link.endpoint, OFFER) as offered:
            decision = await grant(offered)
            await sender.begin(link.endpoint, decision, made, 1, PATIENCE_S)
            await asyncio.to_thread(early.settle)
            socket = sender._peers[link.endpoint].socket
            link.cut()
            await until(lambda: sender._peers[link.endpoint].socket is not socket)
            if sender.way == "inline":
                with pytest.raises(GrantLostError):
                    await sender.deliver(link.endpoint, decision, EMBEDDING, PATIENCE_S)
            else:
                await sender.deliver(link.endpoint, decision, EMBEDDING, PATIENCE_S)
        if sender.way == "inline":
            async with sender.offer(link.endpoint, OFFER) as offered:
                decision = await grant(offered)
                await sender.deliver(link.endpoint, decision, EMBEDDING, PATIENCE_S)
    finally:
        link.close()
    (whole,) = await asyncio.to_thread(early.tensors)
    assert torch.equal(whole, EMBEDDING)


@pytest.mark.parametrize("sender", ["shared", "remote"], indirect=True)
async def test_memory_that_is_still_written_to_is_nobody_elses(receiver, sender, early):
    """An encoder whose grant another one took begins on, until it hears of that at its end."""
    other, reservations = Sender(), receiver._reservations
    async with sender.offer(receiver.endpoint, OFFER) as offered:
        decision = await grant(offered)
        await sender.begin(receiver.endpoint, decision, made_so_far(), 1, PATIENCE_S)
        async with other.offer(receiver.endpoint, OFFER) as anew:
            await grant(anew)
            assert reservations.quarantined
            await sender.begin(receiver.endpoint, decision, made_so_far(), 1, PATIENCE_S)
            await until(lambda: receiver.tally.counts["dropped", "not_granted"])
            assert reservations.quarantined
            with pytest.raises(GrantLostError):
                await sender.deliver(receiver.endpoint, decision, EMBEDDING, PATIENCE_S)
            # The receiver may answer before its books are in order.
            await until(lambda: not reservations.quarantined)
    await other.close()


@pytest.mark.parametrize("reached", [True, False])
async def test_a_beginning_that_is_cancelled_holds_its_memory_while_it_is_written(
    receiver, early, monkeypatch, reached
):
    """Also where there is no way to the memory in the end."""
    sender = Sender()
    slow = SlowWriter(sender, monkeypatch)
    if not reached:
        slow._write = unreachable

    async def begin() -> None:
        async with sender.offer(receiver.endpoint, OFFER) as offered:
            decision = await grant(offered)
            await sender.begin(receiver.endpoint, decision, made_so_far(), 1, PATIENCE_S)

    beginning = asyncio.create_task(begin())
    await until(slow.writing.is_set)
    beginning.cancel()
    await asyncio.wait([beginning])
    await asyncio.to_thread(early.flush)
    assert receiver._reservations.held_bytes
    assert not receiver.tally.counts["withdrawals", ""]
    slow.go_on.set()
    await until(lambda: not receiver._reservations.held_bytes)
    await sender.close()
