"""Encoders and language servers with a network between them that loses what it likes.

Real senders, a real receiver, real sockets: whatever the network and the servers do, every
item that is wanted arrives as it was made, and nothing stays held.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from integrity import check_ledger
from sglang_epd.errors import EpdError
from sglang_epd.transfer import host
from sglang_epd.transfer import receiver as receiver_module
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire import messages as wire
from transfer.conftest import READERS, Scheduler, encode
from transfer.links import Link
from waiting import reached

BUDGET = 8 << 20
WIDTH = 64
# Rows of an item: one frame, or several.
SIZES = (3, 1 << 13)
DEAD_S = 0.25
# From when all is well again until everything that is wanted is there.
BOUND_S = 60.0
KINDS = ("offer", "wait", "grant", "payload", "withdraw", "ack", "decline")


@functools.lru_cache(64)
def made(ticket: str, item: int) -> torch.Tensor:
    """The embedding of an item, always the same."""
    rows = SIZES[(int(ticket) + item) % 2]
    generator = torch.Generator().manual_seed(1000 * int(ticket) + item)
    return torch.randn(rows, WIDTH, generator=generator)


async def send(sender: Sender, endpoint: str, ticket: str, item: int) -> str:
    embedding = made(ticket, item)
    layout = wire.Layout("IMAGE", wire.TensorSpec("float32", tuple(embedding.shape)), [[1, 2, 4]])
    offer = wire.Offer(
        ticket, item, f"{ticket}/{item}".encode().ljust(32), layout, embedding.nbytes
    )
    return await encode(sender, endpoint, offer, embedding, 60.0)


@dataclass
class Request:
    ticket: str
    items: int
    wanted: bool = True
    tasks: list[tuple[int, Future[str]]] = field(default_factory=list)


class Lossy(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.folder = tempfile.TemporaryDirectory()
        self.tickets = itertools.count()
        self.requests: dict[str, Request] = {}
        self.scheduler: Scheduler | None = None
        self.start_receiver()
        self.link = Link(self.receiver.endpoint)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.senders = [self.new_sender(number) for number in range(2)]

    @initialize(requests=st.integers(1, 3))
    def begin(self, requests: int) -> None:
        for _ in range(requests):
            self.new_request(2)

    # What the servers do.

    @rule(items=st.integers(1, 3))
    def new_request(self, items: int) -> None:
        request = Request(str(next(self.tickets)), items)
        self.requests[request.ticket] = request
        self.scheduler.claims.claim(request.ticket, wire.Expect(request.ticket, items, 600.0))
        for item in range(items):
            self.offer(request, item, item % 2)

    # Which of them are open is a matter of time, so they are drawn by number.

    @rule(number=st.integers(0, 5), item=st.integers(0, 5), sender=st.integers(0, 1))
    def offer_again(self, number: int, item: int, sender: int) -> None:
        """As a dispatcher does that has found an encoder silent."""
        for request in self.open[number : number + 1]:
            self.offer(request, item % request.items, sender)

    @rule(number=st.integers(0, 5), item=st.integers(0, 5))
    def leave(self, number: int, item: int) -> None:
        """An encoder gives one item up."""
        for request in self.open[number : number + 1]:
            request.tasks[item % len(request.tasks)][1].cancel()

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        for request in self.open[number : number + 1]:
            request.wanted = False
            self.scheduler.claims.abandon(request.ticket)

    @rule()
    def read(self) -> None:
        """Requests that have their items end, and drop them."""
        self.take(0.02)

    @rule(number=st.integers(0, 1))
    def restart_encoder(self, number: int) -> None:
        self.end_encoder(number)
        self.senders[number] = self.new_sender(number)

    @rule()
    def restart_receiver(self) -> None:
        """Its requests are gone with it."""
        self.receiver.stop()
        check_ledger(self.receiver._ledger)
        self.requests.clear()
        self.start_receiver()
        self.link.lead_to(self.receiver.endpoint)
        self.link.cut()

    # What the network does.

    @rule()
    def cut(self) -> None:
        self.link.cut()

    @rule(nbytes=st.one_of(st.integers(0, 600), st.integers(0, 3 << 20)))
    def cut_in(self, nbytes: int) -> None:
        self.link.cut_in(nbytes)

    @rule(kind=st.sampled_from(KINDS), after=st.booleans())
    def cut_at(self, kind: str, after: bool) -> None:
        self.link.cut_at(kind, after=after)

    @rule(past_death=st.booleans())
    def freeze(self, past_death: bool) -> None:
        self.link.freeze()
        time.sleep(1.5 * DEAD_S if past_death else 0.02)

    @rule()
    def thaw(self) -> None:
        self.link.thaw()

    @rule(delay_s=st.sampled_from((0.0, 0.002, 0.02)))
    def delay(self, delay_s: float) -> None:
        self.link.delay_s = delay_s

    @rule(seconds=st.sampled_from((0.01, 0.1)))
    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    # How it has to end.

    def teardown(self) -> None:
        try:
            self.all_ends_well()
        finally:
            for number in range(2):
                self.end_encoder(number)
            self.scheduler.close()
            self.receiver.stop()
            self.link.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
            self.folder.cleanup()
        check_ledger(self.receiver._ledger)

    def all_ends_well(self) -> None:
        """Once the network is well and every item has an encoder, all ends by itself."""
        self.link.thaw()
        limit = time.monotonic() + BOUND_S
        while self.open:
            assert time.monotonic() < limit, self.state()
            for request in self.open:
                self.send_what_nobody_sends(request)
            self.take(0.01)
        reached(lambda: all(task.done() for task in self.tasks), BOUND_S, "an offer has no answer")
        while self.receiver._reservations.held_bytes or self.receiver._held:
            assert time.monotonic() < limit, self.state()
            # What was settled as its request was cancelled is read, and given back.
            self.take(0.005)
            gc.collect()
        assert not self.receiver._reservations.quarantined
        assert len(self.receiver._ledger) == 0
        assert self.receiver.tally.counts["dropped", "internal"] == 0

    def send_what_nobody_sends(self, request: Request) -> None:
        """Only of what failed or was given up: an offer that is open has to be answered."""
        for item in range(request.items):
            last = [task for number, task in request.tasks if number == item][-1]
            if last.done() and (last.cancelled() or last.exception() is not None):
                if last.cancelled() or isinstance(last.exception(), EpdError):
                    self.offer(request, item, item % 2)
                else:
                    last.result()

    def take(self, seconds: float) -> None:
        self.scheduler.claims.socket.poll(seconds * 1e3)
        for settled in self.scheduler.claims.take():
            request = self.requests.get(settled.claim)
            if request is None or settled.code:
                assert request is None or not request.wanted, settled
                continue
            for item, landed in enumerate(settled.items):
                tensor = self.scheduler.arena.read(landed, 0)
                assert torch.equal(tensor, made(request.ticket, item)), "other bytes"
            request.wanted = False

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests.values() if request.wanted]

    @property
    def tasks(self) -> list[Future[str]]:
        return [task for request in self.requests.values() for _, task in request.tasks]

    def offer(self, request: Request, item: int, number: int) -> None:
        task = send(self.senders[number], self.link.endpoint, request.ticket, item)
        request.tasks.append((item, asyncio.run_coroutine_threadsafe(task, self.loop)))

    def new_sender(self, number: int) -> Sender:
        """An encoder: the second shares memory, and its process is one that can end."""

        async def make() -> Sender:
            return Sender(share_memory=bool(number), dead_s=DEAD_S)

        sender = self.call(make())
        self.processes[number] = subprocess.Popen(["sleep", "600"])
        pid = self.processes[number].pid
        if number:
            sender._process = f"{host._machine()}/{pid}/{host._started(pid)}"
        return sender

    def end_encoder(self, number: int) -> None:
        self.call(self.senders[number].close())
        self.processes[number].kill()
        self.processes[number].wait()

    def start_receiver(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        control = Path(self.folder.name) / f"run-{random.random()}" / "c"
        self.receiver = Receiver(
            "127.0.0.1", "127.0.0.1", control, budget_bytes=BUDGET, readers=READERS, grant_ttl_s=1.0
        )
        self.receiver.start()
        self.scheduler = Scheduler(control)

    def call(self, coroutine: Coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(BOUND_S)

    def state(self) -> str:
        reserved = self.receiver._reservations
        open_offers = [
            (request.ticket, item)
            for request in self.open
            for item, task in request.tasks
            if not task.done()
        ]
        return (
            f"{reserved.held_bytes} bytes held, {len(reserved.quarantined)} blocks in quarantine, "
            f"no answer to {open_offers}"
        )


@pytest.fixture(autouse=True)
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "_ASK_S", 0.05)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Lossy,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_network_that_loses_what_it_likes_loses_no_item() -> None:
    run(examples=12, steps=12)


@pytest.mark.extended
@pytest.mark.timeout(1800)
def test_a_network_that_loses_what_it_likes_loses_no_item_for_long() -> None:
    run(examples=400, steps=30)


async def test_a_hundred_encoders_at_once_that_come_late_and_twice(tmp_path: Path) -> None:
    """All of them offer every item, some give up at any moment, some wait for no answer."""
    rng, tickets = random.Random(7), [str(number) for number in range(30)]
    receiver = Receiver(
        "127.0.0.1", "127.0.0.1", tmp_path / "run" / "c", budget_bytes=BUDGET, readers=READERS
    )
    receiver.start()
    scheduler = await asyncio.to_thread(Scheduler, tmp_path / "run" / "c")
    senders = [Sender(share_memory=number % 2 == 0, dead_s=5.0) for number in range(100)]
    # Those that gave up are granted memory, and say so, before those that wait: on a busy machine
    # that takes a while.
    patient = (2 * BOUND_S, 2 * BOUND_S)
    over, reading, seen = threading.Event(), None, set[str]()

    async def deliver(sender: Sender, ticket: str) -> str:
        await asyncio.sleep(rng.random())
        try:
            async with asyncio.timeout(rng.choice((0.001, 0.02, 0.2, *patient))):
                return await send(sender, receiver.endpoint, ticket, 0)
        except TimeoutError:
            return "late"

    def read() -> None:
        limit = time.monotonic() + 2 * BOUND_S
        while len(seen) < len(tickets) and not over.is_set():
            assert time.monotonic() < limit, f"{len(seen)} of {len(tickets)}"
            scheduler.claims.socket.poll(10)
            for settled in scheduler.claims.take():
                assert not settled.code, settled
                tensor = scheduler.arena.read(settled.items[0], 0)
                assert torch.equal(tensor, made(settled.claim, 0))
                seen.add(settled.claim)

    try:
        for ticket in tickets:
            scheduler.claims.claim(ticket, wire.Expect(ticket, 1, 600.0))
        reading = asyncio.create_task(asyncio.to_thread(read))
        told = await asyncio.gather(*(deliver(one, t) for one in senders for t in tickets))
        # A patient one may hear that another has the grant, which then gives up: as a
        # language server does, have such an item sent once more.
        while not reading.done():
            for ticket in set(tickets) - seen:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        told.append(await send(senders[0], receiver.endpoint, ticket, 0))
            await asyncio.sleep(0.1)
        await reading
        # Who gave up between its payload and the ack does not know that it delivered.
        assert 0 < sum(how in {"inline", "shared"} for how in told) <= len(tickets)
        assert set(told) <= {"inline", "shared", "late", "duplicate"}
        limit = time.monotonic() + BOUND_S
        while receiver._reservations.held_bytes or receiver._held:
            assert time.monotonic() < limit, receiver._reservations.quarantined
            gc.collect()
            await asyncio.sleep(0.01)
        assert len(receiver._ledger) == 0
        assert receiver.tally.counts["dropped", "internal"] == 0
    finally:
        # A socket that another thread polls must not be closed: libzmq ends the process.
        over.set()
        if reading is not None:
            await asyncio.wait([reading])
        for sender in senders:
            await sender.close()
        scheduler.close()
        await asyncio.to_thread(receiver.stop)
    check_ledger(receiver._ledger)
