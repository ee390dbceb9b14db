"""A burst that is many times the receive budget: everything arrives, memory does not grow.

The encoder's service with a made-up tower, and the receiver with a reader that takes its
time, in processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.tower import Prepared
from sglang_epd.media import Account, FetchedMedia, MediaSource, digest
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.transfer.control import Claims
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire.http import EncodeItem, EncodeReply, EncodeRequest, ReplyTo
from sglang_epd.wire.messages import Expect, Layout, TensorSpec

MIB = 1 << 20
BUDGET = 64 * MIB
EMBEDDING = 8 * MIB
REQUESTS = 50
ROWS, WIDTH = 2048, 1024
TTL_S = 120.0
# First use of libraries, zmq's buffers of a burst of frames, and what malloc keeps of
# large blocks that were freed.
SLACK = 96 * MIB
# Granted, on their way to an answer, or taken and about to be let go.
IN_HAND = BUDGET // EMBEDDING + 8


def resident(kind: str) -> int:
    """Resident bytes of this process; VmHWM is the most there ever was, shared included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {kind}")


def forget_peak() -> None:
    """Let VmHWM begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class Tower:
    """Makes the image's number into an embedding, and counts those that are alive."""

    def __init__(self) -> None:
        self._alive = 0
        self.most = 0

    async def prepare(self, modality: str, data: bytes, deadline: float = math.inf) -> Prepared:
        layout = Layout(modality, TensorSpec("float32", (ROWS, WIDTH)), [[1, 2, 2]])
        return Prepared(layout, 4, modality, data)

    @property
    def depth(self) -> int:
        return 1

    @property
    def alive(self) -> bool:
        return True

    @property
    def preparers(self) -> int:
        return 4

    async def forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        await asyncio.sleep(0.002 * len(batch))
        return [self._embedding(prepared) for prepared in batch]

    def discard(self, prepared: Prepared) -> None:
        pass

    def _embedding(self, prepared: Prepared) -> torch.Tensor:
        embedding = torch.full((ROWS, WIDTH), float(prepared.content))
        self._alive += 1
        self.most = max(self.most, self._alive)
        weakref.finalize(embedding, self._died)
        return embedding

    def _died(self) -> None:
        self._alive -= 1


class Fetcher:
    async def fetch(self, source: MediaSource, deadline: float, _account: Account) -> FetchedMedia:
        assert source.data is not None
        return FetchedMedia(source.data, digest(source.data), source)


def receive(control: Path) -> None:
    """A language server: claims tickets, reads each embedding for some milliseconds.

    Speaks lines of JSON with the test.
    """
    receiver = Receiver("127.0.0.1", "127.0.0.1", control, budget_bytes=BUDGET)
    receiver.start()
    claims = Claims(control)
    arena = claims.connect(20.0)
    print(json.dumps(receiver.endpoint), flush=True)
    tickets = json.loads(sys.stdin.readline())
    torch.ones(ROWS, WIDTH).sum().item()
    forget_peak()
    before = resident("VmRSS")
    for number, ticket in enumerate(tickets):
        claims.claim(str(number), Expect(ticket, 1, 1, TTL_S))
    print(json.dumps("claimed"), flush=True)
    right = 0
    done = 0
    deadline = time.monotonic() + TTL_S
    while done < len(tickets) and time.monotonic() < deadline:
        claims.socket.poll(1000)
        for settled in claims.take():
            done += 1
            assert not settled.code, settled.message
            (item,) = settled.items
            embedding = arena.read(item, 0)
            right += bool((embedding == float(settled.claim)).all())
            time.sleep(0.01)
            del embedding
    waits = receiver.tally.counts["waits", ""]
    print(json.dumps([right, resident("VmHWM") - before, waits]), flush=True)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "socket"])
def test_a_burst_over_the_budget_arrives_without_memory_growing(
    tmp_path: Path, shared: bool
) -> None:
    command = [sys.executable, __file__, str(tmp_path / "control")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        endpoint = heard(child)
        tickets = [secrets.token_hex(8) for _ in range(REQUESTS)]
        print(json.dumps(tickets), file=child.stdin, flush=True)
        assert heard(child) == "claimed"
        forget_peak()
        before = resident("VmRSS")
        tower = Tower()
        replies = asyncio.run(encode(tower, endpoint, tickets, shared))
        grown = resident("VmHWM") - before
        right, receiver_grown, waits = heard(child)
    finally:
        child.kill()
        child.communicate()
    assert [outcome.state for reply in replies for outcome in reply.outcomes] == (
        ["delivered"] * REQUESTS
    )
    assert right == REQUESTS
    assert waits > 0, "the budget was never reached: this shows nothing"
    assert receiver_grown <= BUDGET + SLACK
    assert tower.most <= IN_HAND
    # Pages of the receiver's that the encoder writes to count as the encoder's too.
    assert grown <= (BUDGET if shared else 0) + IN_HAND * EMBEDDING + SLACK


def heard(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "the receiver's process has ended"
    return json.loads(line)


async def encode(
    tower: Tower, endpoint: str, tickets: list[str], shared: bool
) -> list[EncodeReply]:
    sender = Sender(share_memory=shared)
    metrics = EncoderMetrics()
    bounds = BatchBounds(patches=1024, items=1)
    computations = Computations([tower], EmbeddingCache(0), metrics, batch=bounds)
    service = EncoderService(
        computations=computations,
        fetcher=Fetcher(),  # type: ignore[arg-type]
        sender=sender,
        admission=Admission(max_items=1024, max_bytes=1 << 20),
        metrics=metrics,
        namespace="test",
        name="encoder",
    )
    try:
        requests = [
            EncodeRequest(
                f"request-{number}",
                "test",
                TTL_S,
                ReplyTo(endpoint, ticket),
                [EncodeItem(0, "IMAGE", "image 1 of 1", data=str(number).encode())],
            )
            for number, ticket in enumerate(tickets)
        ]
        with service.receiving() as room:
            encoding = (service.encode(request, room) for request in requests)
            return list(await asyncio.gather(*encoding))
    finally:
        await computations.close()
        await sender.close()


if __name__ == "__main__":
    receive(Path(sys.argv[1]))
