"""The encoder against real receivers, whose memory holds one item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from sglang_epd.errors import OverloadedError
from sglang_epd.spans import OFF
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.control import Claims
from sglang_epd.transfer.delivery import Granted, Offered
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.wire.http import ReplyTo
from sglang_epd.wire.messages import Expect, Grant, Inline, Offer, Settled
from waiting import until

PATIENCE_S = 20.0


class Watched(Sender):
    """A sender whose offers can be looked at, by their ticket."""

    def __init__(self, share_memory: bool) -> None:
        super().__init__(share_memory=share_memory)
        self.offered: dict[str, Offered] = {}

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        async with super().offer(endpoint, offer) as offered:
            self.offered[offer.ticket] = offered
            yield offered


class LanguageServer:
    """A receiver, and a scheduler that claims from it."""

    def __init__(self, control_path: Path, budget_bytes: int) -> None:
        self.receiver = Receiver("127.0.0.1", "127.0.0.1", control_path, budget_bytes=budget_bytes)
        self.receiver.start()
        self._claims = Claims(control_path)
        self._arena: Arena = self._claims.connect(PATIENCE_S)

    def expect(self, ticket: str, items: int = 1) -> None:
        self._claims.claim(ticket, Expect(ticket, items, 30.0))

    async def embedding(self) -> torch.Tensor:
        """Of the request that settles next."""
        settled: list[Settled] = []
        await until(lambda: settled.extend(self._claims.take()) or settled)
        assert not settled[0].code, settled[0].message
        return self._arena.read(settled[0].items[0], reader=0)

    async def serve(self, requests: int) -> None:
        """Prefill so many, each as soon as all its items are here, which are dropped then."""
        settled: list[Settled] = []
        while len(settled) < requests:
            settled += (done := self._claims.take())
            for one in done:
                assert not one.code, one.message
                for item in one.items:
                    self._arena.read(item, reader=0)
            await asyncio.sleep(0.001)

    def count(self, name: str) -> int:
        return self.receiver.tally.counts[name, ""]

    def close(self) -> None:
        self._claims.close()
        self._arena.close()
        self.receiver.stop()


@pytest.fixture
def language_server(tmp_path) -> Iterator[Callable[..., LanguageServer]]:
    started: list[LanguageServer] = []

    def start(budget_bytes: int = ALIGNMENT) -> LanguageServer:
        control_path = tmp_path / str(len(started)) / "control"
        started.append(LanguageServer(control_path, budget_bytes))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(params=[True, False], ids=["shared", "inline"])
async def sender(request) -> AsyncIterator[Watched]:
    sender = Watched(request.param)
    yield sender
    await sender.close()


@pytest.fixture
def service(service_for, sender):
    return service_for(sender, namespace="n")


@pytest.fixture
def encode(service, asking):
    """Have one item encoded for a language server, which claims it by its name."""

    def start(name: bytes, server: LanguageServer) -> asyncio.Task:
        ticket = name.decode()
        server.expect(ticket)
        request = asking(name, request_id=ticket, namespace="n")
        reply_to = ReplyTo(server.receiver.endpoint, ticket)
        request = msgspec.structs.replace(request, reply_to=reply_to)
        return asyncio.create_task(service.encode(request))

    return start


async def delivered(work: asyncio.Task) -> None:
    (outcome,) = (await asyncio.wait_for(work, PATIENCE_S)).outcomes
    assert outcome.state == "delivered", outcome


async def test_an_item_waits_with_nothing_in_hand_while_others_go_on(
    encode, fakes, sender, language_server
):
    full, free = language_server(), language_server(1 << 20)
    await delivered(encode(b"reading", full))
    embedding = await full.embedding()
    assert torch.equal(embedding, torch.full((3, 4), 7.0))

    fakes.forwarded.hold()
    busy = encode(b"busy", free)
    waits = encode(b"waits", full)
    await until(lambda: "waits" in sender.offered and sender.offered["waits"].waits)
    fakes.forwarded.go_on()
    await delivered(busy)
    await delivered(encode(b"another", free))
    assert fakes.pixels == []
    assert fakes.forwarded.calls == [b"reading", b"busy", b"another"]
    assert not waits.done()

    del embedding
    await delivered(waits)
    assert fakes.forwarded.calls[3:] == [b"waits"]
    assert torch.equal(await full.embedding(), torch.full((3, 4), 5.0))
    assert (full.count("waits"), full.count("grants")) == (1, 2)


@pytest.mark.parametrize("grants", [True, False])
async def test_an_embedding_that_is_there_waits_for_the_receivers_word(
    service, monkeypatch, grants
):
    """That of a store, say: given away at once, it would be read, or made, again."""
    monkeypatch.setattr(service.admission, "awaiting_memory", lambda _request_id: nullcontext())
    loop, wanted, offered = asyncio.get_running_loop(), [], Offered(16)
    made = loop.create_future()
    made.set_result(None)
    hold = SimpleNamespace(made=made, want=wanted.append)
    granted = Granted(Grant("t", 0, 1, 30.0, Inline()), 0.0, 16)

    def say() -> None:
        offered.answered.set_result(not grants)
        if grants:
            offered.decided.set_result(granted)

    loop.call_later(0.05, say)
    loop.call_later(0.1, lambda: grants or offered.decided.set_result(granted))
    asked = SimpleNamespace(span=OFF, ms={}, request=SimpleNamespace(request_id="r"))
    assert await service._decision(asked, hold, offered) is granted
    assert wanted == ([] if grants else [False])


@pytest.mark.parametrize(("max_items", "max_bytes"), [(8, 1000), (1000, 16)])
async def test_items_that_wait_keep_no_encoder_from_those_that_they_wait_for(
    service, sender, asking, language_server, max_items, max_bytes
):
    """Requests are sent in parts, as dispatchers do, and none fits into memory beside the others:
    one of them at a time may fill the lower half of the memory, with both of its parts. A part has
    at most a quarter of the bytes that may be in work.
    """
    service.admission.max_items, service.admission.max_bytes = max_items, max_bytes
    server, names = language_server(8 * ALIGNMENT), [f"r{n}" for n in range(8)]
    for name in names:
        server.expect(name, items=4)

    async def part(name: str, first: int) -> None:
        whole = asking(b"a%d" % first, b"b%d" % first, request_id=f"{name}.{first}", namespace="n")
        left = [msgspec.structs.replace(one, item=one.item + first) for one in whole.items]
        reply_to = ReplyTo(server.receiver.endpoint, name)
        while left:
            request = msgspec.structs.replace(whole, items=left, reply_to=reply_to)
            with suppress(OverloadedError), service.receiving() as room:
                room.take(sum(len(one.data or b"") for one in left))
                outcomes = (await service.encode(request, room)).outcomes
                assert {one.code for one in outcomes} <= {"", "OverloadedError"}
                sent = {one.item for one in outcomes if one.state == "delivered"}
                left = [one for one in left if one.item not in sent]
            await asyncio.sleep(0.01)  # as dispatchers do before they come again

    async def request(name: str) -> None:
        await part(name, 0)
        await part(name, 2)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(len(names)))
        for name in names:
            tasks.create_task(request(name))
    assert server.count("waits") > 0
    assert (service.admission.items, service.admission.waiting) == (0, 0)
