"""Processor time an item with 1, 10, 100 and 1,000 items waiting, without servers or a model.

The stages of an encoder with a tower that takes no time, the dispatcher with an encoder that
answers the oldest request first, and the payload channel from an encoder's offer to a scheduler
that drops the item, with sockets and memory as in servers. A closed loop: as one item ends
another one begins. What one item costs must not depend on how many wait.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

WAITING = (1, 10, 100, 1000)
_ITEMS = 2000
_REPEATS = 3
_SCARCE = 8
HOST = "127.0.0.1"
TTL_S = 600.0


class Queued(msgspec.Struct, frozen=True):
    """A closed loop of so many items.

    Attributes:
        part: of the way of an item.
        waiting: items under way at a time.
        item_ms: processor milliseconds an item.
    """

    part: str
    waiting: int
    item_ms: float


def queued(pipe: Connection) -> None:
    """Sends a list of `Queued`, numbers of waiting items in turns."""
    parts = {
        "encoder, a request each": _encode,
        "encoder, requests of 100": _encode_hundreds,
        "dispatch": _dispatch,
        "payload channel": _transfer,
        f"payload channel, memory for {_SCARCE}": _transfer_scarce,
    }
    found = []
    for part, run in parts.items():
        for waiting in WAITING * _REPEATS:
            found.append(Queued(part, waiting, 1e3 * asyncio.run(run(waiting))))
    pipe.send(found)


def queued_rows(found: Sequence[Queued]) -> list[list[str]]:
    """A table of medians."""
    rows = [["processor ms an item", *(f"{number:,} waiting" for number in WAITING)]]
    for part in dict.fromkeys(one.part for one in found):
        medians = (
            statistics.median(
                one.item_ms for one in found if (one.part, one.waiting) == (part, number)
            )
            for number in WAITING
        )
        rows.append([part, *(f"{ms:.2f}" for ms in medians)])
    return rows


async def _loop(waiting: int, one: Callable[[int], Awaitable[None]]) -> float:
    """Processor seconds an item, with so many under way all the time."""
    numbers, ended, over = itertools.count(), 0, asyncio.Event()
    began = [0.0]

    async def ask() -> None:
        nonlocal ended
        while not over.is_set():
            await one(next(numbers))
            ended += 1
            if ended == waiting:  # all queues are full
                began[0] = time.process_time()
            elif ended == waiting + _ITEMS:
                began.append(time.process_time())
                over.set()

    async with asyncio.TaskGroup() as askers:
        for _ in range(waiting):
            askers.create_task(ask())
    return (began[1] - began[0]) / _ITEMS


class Tower:
    """Prepares and runs in no time.

    All embeddings are one, in memory that has been written to, as those of a tower are: a first
    read of other memory costs a page fault for each 4 KiB.
    """

    def __init__(self, width: int = 128, grid: tuple[int, int] = (28, 28)) -> None:
        import torch

        self._layout = _layout(width, grid)
        self._embedding = torch.zeros(self._layout.embedding.shape, dtype=torch.bfloat16)

    alive, preparers, depth, weights_bytes = True, 4, 2, 0
    dtype, modalities = "bfloat16", ("IMAGE",)

    async def prepare(
        self, modality: str, data: bytes, deadline: float = math.inf, options: Any = None
    ) -> Any:
        from sglang_epd.encoder.tower import Prepared

        await asyncio.sleep(0)
        return Prepared(self._layout, 784, None, None)

    async def forward(self, batch: Sequence[Any], tell: Any = None) -> list[Any]:
        await asyncio.sleep(0)
        return [self._embedding] * len(batch)

    def discard(self, prepared: Any) -> None: ...

    async def profile(self, asked: Any) -> None: ...

    async def close(self) -> None: ...


def _layout(width: int = 128, grid: tuple[int, int] = (28, 28)) -> Any:
    """Of a picture of so many patches, four of which are a token."""
    from sglang_epd.wire.messages import Layout, TensorSpec

    tokens = grid[0] * grid[1] // 4
    return Layout("IMAGE", TensorSpec("bfloat16", (tokens, width)), [[1, *grid]])


async def _encode(waiting: int, of_a_request: int = 1) -> float:
    from sglang_epd.cache import EmbeddingCache
    from sglang_epd.encoder.pipeline.computations import Computations
    from sglang_epd.encoder.pipeline.scheduling import BatchBounds
    from sglang_epd.observability.encoder import EncoderMetrics

    computations = Computations(
        [Tower()], EmbeddingCache(0), EncoderMetrics(), batch=BatchBounds(16_384, 32)
    )

    async def one(number: int) -> None:
        owner = f"request {number // of_a_request}"
        until = time.monotonic() + TTL_S
        hold = computations.hold(number.to_bytes(32, "big"), "IMAGE", b"", owner, until)
        try:
            await hold.embedding()
        finally:
            hold.release()

    spent = await _loop(waiting, one)
    await computations.close()
    return spent


async def _encode_hundreds(waiting: int) -> float:
    return await _encode(waiting, 100)


async def _dispatch(waiting: int) -> float:
    from sglang_epd.dispatch.client import EncoderClient
    from sglang_epd.dispatch.dispatcher import Dispatcher
    from sglang_epd.dispatch.policies import policy
    from sglang_epd.dispatch.pool import Pool, Report
    from sglang_epd.dispatch.work import Costs, describe
    from sglang_epd.wire.http import EncodeItem, EncodeReply, ItemOutcome, ReplyTo

    url, asked = "http://encoder", deque[asyncio.Future[None]]()

    class Encoder(EncoderClient):
        async def encode(self, url: str, request: Any, headers: Any = None) -> EncodeReply:
            asked.append(asyncio.get_running_loop().create_future())
            if len(asked) == waiting:
                asked.popleft().set_result(None)
            else:
                await asked[-1]
            outcomes = [
                ItemOutcome(item.item, "delivered", layout=_layout(), key=bytes(32))
                for item in request.items
            ]
            return EncodeReply(request.request_id, url, outcomes)

    pool, costs = Pool("namespace"), Costs()
    pool.add(url)
    pool.heard(url, Report("namespace"))
    dispatcher = Dispatcher(
        Encoder(), pool, policy("affinity"), describe=lambda items: describe(items, costs)
    )

    async def one(number: int) -> None:
        item = EncodeItem(0, "IMAGE", "image 1 of 1", data=number.to_bytes(32, "big"))
        await dispatcher.run(ReplyTo("tcp://", str(number)), [item], time.monotonic() + TTL_S)

    return await _loop(waiting, one)


async def _transfer(waiting: int, room: int = 2 * max(WAITING)) -> float:
    import torch

    from sglang_epd.transfer.control import Claims
    from sglang_epd.transfer.delivery import Granted
    from sglang_epd.transfer.receiver import Receiver
    from sglang_epd.transfer.sender import Sender
    from sglang_epd.wire.messages import Expect, Offer, Settled
    from sglang_epd.wire.tensors import spec_bytes

    layout = _layout()
    nbytes = spec_bytes(layout.embedding)
    embedding = torch.zeros(layout.embedding.shape, dtype=torch.bfloat16)
    settled: dict[str, asyncio.Future[None]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-epd-host-")))
        receiver = Receiver(HOST, HOST, folder / "control", budget_bytes=room * nbytes)
        receiver.start()
        stack.callback(receiver.stop)
        claims, sender = Claims(folder / "control"), Sender()
        stack.callback(claims.close)
        arena = claims.connect(10.0)

        def take() -> None:
            for outcome in claims.take():
                assert isinstance(outcome, Settled) and not outcome.code, outcome
                arena.receive(outcome, 0)  # and drop it
                settled.pop(outcome.claim).set_result(None)

        async def look() -> None:
            while True:  # as a scheduler does, between its passes
                take()
                await asyncio.sleep(0.002)

        async def one(number: int) -> None:
            name = str(number)
            settled[name] = end = asyncio.get_running_loop().create_future()
            claims.claim(name, Expect(name, 1, TTL_S))
            offer = Offer(name, 0, number.to_bytes(32, "big"), layout, nbytes)
            async with sender.offer(receiver.endpoint, offer) as offered:
                granted = await offered.decided
                assert isinstance(granted, Granted), granted
                await sender.deliver(receiver.endpoint, granted, embedding, TTL_S)
            await end

        looking = asyncio.create_task(look())
        spent = await _loop(waiting, one)
        looking.cancel()
        await sender.close()
    return spent


async def _transfer_scarce(waiting: int) -> float:
    return await _transfer(waiting, _SCARCE)
