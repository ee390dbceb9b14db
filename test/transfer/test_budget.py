"""A burst that is many times the receive budget: everything arrives, memory does not grow."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from pathlib import Path

import pytest
import torch

from sglang_epd.transfer.delivery import Granted
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire.messages import Expect, Layout, Offer, TensorSpec
from transfer.conftest import PATIENCE_S, Scheduler
from transfer.receiver_process import MIB, forget_peak, peak, receiver_process
from waiting import until

SHAPE = (2048, 1024)
LAYOUT = Layout("IMAGE", TensorSpec("float32", SHAPE), [[1, 2, 2]])
EMBEDDING = 4 * SHAPE[0] * SHAPE[1]
FIT, REQUESTS = 8, 50
BUDGET = FIT * EMBEDDING
# First use of libraries, zmq's buffers of a burst of frames, and what malloc keeps of
# large blocks that were freed.
SLACK = 96 * MIB
# All that fit may be acknowledged at once, and others be granted before those are let go.
IN_HAND = 2 * FIT


class Encoder:
    """Makes the number of a request into its embedding once that is granted.

    Attributes:
        living, most: embeddings that there are, and were at a time.
    """

    def __init__(self, sender: Sender, endpoint: str) -> None:
        self._sender = sender
        self._endpoint = endpoint
        self.living = self.most = 0

    async def send(self, ticket: str, number: int) -> str:
        offer = Offer(ticket, 0, bytes(32), LAYOUT, EMBEDDING)
        async with self._sender.offer(self._endpoint, offer) as offered:
            granted = await offered.decided
            assert isinstance(granted, Granted)
            embedding = torch.full(SHAPE, float(number))
            self.living += 1
            self.most = max(self.most, self.living)
            weakref.finalize(embedding, self._died)
            return await self._sender.deliver(self._endpoint, granted, embedding, 60.0)

    def _died(self) -> None:
        self.living -= 1


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "socket"])
async def test_a_burst_over_the_budget_arrives_without_memory_growing(
    tmp_path: Path, shared: bool
) -> None:
    control, sender = tmp_path / "run" / "c", Sender(share_memory=shared)
    with receiver_process(control, budget=BUDGET) as process:
        scheduler, encoder = Scheduler(control), Encoder(sender, process.endpoint)
        try:
            tickets = {secrets.token_hex(8): number for number in range(REQUESTS)}
            for ticket in tickets:
                scheduler.claims.claim(ticket, Expect(ticket, 1, 120.0))
            scheduler.flush()
            own, its = forget_peak("self"), forget_peak(process.pid)
            burst = asyncio.gather(*(encoder.send(*about) for about in tickets.items()))
            # Nothing is read yet: what fits is there, and the rest waits.
            await until(lambda: process.state()["received_bytes"] == BUDGET)
            await until(lambda: process.state()["waits"] == REQUESTS - FIT)
            await until(lambda: not encoder.living)
            for _ in tickets:
                (settled,) = await asyncio.to_thread(scheduler.settle)
                assert not settled.code, settled.message
                embedding = scheduler.arena.read(settled.items[0], 0)
                assert (embedding == float(tickets[settled.claim])).all()
                del embedding
            how = await asyncio.wait_for(burst, PATIENCE_S)
            assert peak(process.pid) - its <= BUDGET + SLACK
            # The reader maps all of the receiver's memory in this process.
            assert peak("self") - own <= BUDGET + IN_HAND * EMBEDDING + SLACK
        finally:
            scheduler.close()
            await sender.close()
    assert how == ["shared" if shared else "inline"] * REQUESTS
    assert encoder.most <= IN_HAND
