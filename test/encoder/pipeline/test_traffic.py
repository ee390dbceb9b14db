"""Hundreds of requests at random over fakes: everybody is answered, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from encoder.towers import ROW_BYTES, FakeTower, until
from integrity import check_cache
from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.pipeline import computations as module
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.errors import EpdError, MediaError, UnavailableError
from sglang_epd.media import Account, FetchedMedia, MediaSource, digest
from sglang_epd.transfer.delivery import Granted, GrantLostError, Offered
from sglang_epd.wire.http import EncodeItem, EncodeRequest, ItemOutcome, ReplyTo
from sglang_epd.wire.messages import DECLINE_CANCELLED, Decline, Grant, Inline, Offer, Wait

REQUESTS = 300
MEDIA = [b"%c%d" % (97 + n % 3, n) for n in range(60)]
ROWS = {name: 1 + n % 5 for n, name in enumerate(MEDIA)}
GOOD, BAD_MEDIA, BAD_BATCH, DEADLY = MEDIA[:52], MEDIA[52:55], MEDIA[55:58], MEDIA[58:]
CODES = {
    **dict.fromkeys(BAD_MEDIA, "MediaError"),
    **dict.fromkeys(BAD_BATCH + DEADLY, "EncodeError"),
}
# One of these ends the request's other items.
HOPELESS = ("MediaError", "DeadlineError")


class Receivers:
    """Answer offers at random: late, never, with a wait first, or void in the end."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.open: set[Offered] = set()
        self.delivered: list[torch.Tensor] = []

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        offered = Offered(offer.nbytes)
        self.open.add(offered)
        answering = asyncio.create_task(self.answer(offer, offered))
        try:
            yield offered
        finally:
            self.open.remove(offered)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def answer(self, offer: Offer, offered: Offered) -> None:
        await self.pause()
        if self.dice.random() < 0.3:
            offered.answer(Wait(offer.ticket, offer.item))
            await asyncio.sleep(self.dice.random() * 0.02)
        what = self.dice.random()
        if what < 0.8:
            offered.answer(Grant(offer.ticket, offer.item, 1, 30.0, Inline()))
        elif what < 0.9:
            offered.answer(Decline(offer.ticket, offer.item, DECLINE_CANCELLED))
        elif what < 0.95:
            offered.fail(UnavailableError("the receiver is gone"))

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str:
        kept = embedding.clone()
        await self.pause()
        assert torch.equal(embedding, kept)
        what = self.dice.random()
        if what < 0.1:
            raise GrantLostError
        if what < 0.13:
            raise UnavailableError("the receiver is gone")
        self.delivered.append(embedding)
        return "inline"

    async def fetch(self, source: MediaSource, deadline: float, account: Account) -> FetchedMedia:
        data = source.data or (source.url or "").encode()
        if source.data is None:
            await account.grow(len(data))
        await self.pause()
        return FetchedMedia(data, digest(data))

    async def pause(self) -> None:
        for _ in range(self.dice.randrange(12)):
            await asyncio.sleep(0)


async def meddle(
    dice: random.Random,
    service: EncoderService,
    towers: list[FakeTower],
    live: list[asyncio.Task[None]],
) -> None:
    """Cancel requests, drop embeddings, kill towers and bring them back."""
    while True:
        for _ in range(dice.randrange(60)):
            await asyncio.sleep(0)
        for tower in towers:
            tower.alive = True
        what = dice.random()
        cache = service.computations.cache
        if what < 0.6 and live:
            live.pop(dice.randrange(len(live))).cancel()
        elif what < 0.7:
            cache.clear()
        elif what < 0.95:
            tower = dice.choice(towers)
            tower.revives = dice.random() < 0.5
            tower.die()
        check_cache(cache)


class Asker:
    """Asks for random media, and checks the answers.

    Attributes:
        tally: answers by their code or state.
        live: tasks of requests that may be live.
    """

    def __init__(self, dice: random.Random, service: EncoderService) -> None:
        self.dice = dice
        self.service = service
        self.tally: Counter[str] = Counter()
        self.live: list[asyncio.Task[None]] = []

    async def ask(self, number: int) -> None:
        dice = self.dice
        media = dice.choices([*GOOD * 3, *BAD_MEDIA, *BAD_BATCH, *DEADLY], k=dice.randint(1, 6))
        ttl_s = dice.uniform(0.0, 0.02) if dice.random() < 0.1 else dice.uniform(0.3, 1.0)
        items = [self.item(n, name) for n, name in enumerate(media)]
        name = f"r{number}"
        request = EncodeRequest(name, "n", ttl_s, ReplyTo("tcp://x:1", name), items)
        task = asyncio.current_task()
        assert task is not None
        self.live.append(task)
        began = time.monotonic()
        try:
            with self.service.receiving() as room:
                room.take(sum(len(item.data or b"") for item in items))
                reply = await self.service.encode(request, room)
        except asyncio.CancelledError:
            self.tally["cancelled"] += 1
            return
        except EpdError as error:
            self.tally[error.code] += 1
            return
        finally:
            assert time.monotonic() - began < ttl_s + 5.0
        for outcome in reply.outcomes:
            self.check(media[outcome.item], outcome)
        if not any(outcome.code in HOPELESS for outcome in reply.outcomes):
            assert [outcome.item for outcome in reply.outcomes] == list(range(len(media)))

    def item(self, number: int, name: bytes) -> EncodeItem:
        if self.dice.random() < 0.5:
            return EncodeItem(number, "IMAGE", "image", data=name)
        return EncodeItem(number, "IMAGE", "image", url=name.decode())

    def check(self, medium: bytes, outcome: ItemOutcome) -> None:
        self.tally[outcome.state] += 1
        if outcome.state == "delivered":
            assert medium in GOOD
            assert outcome.tokens == ROWS[medium]
        elif outcome.state == "failed":
            # An offer may fail, and time pass, whatever the medium.
            own = CODES.get(medium, "EncodeError")
            assert outcome.code in ("DeadlineError", "UnavailableError", own)


@pytest.fixture(params=range(4))
async def dice(request, monkeypatch) -> random.Random:
    dice = random.Random(request.param)
    monkeypatch.setattr(module, "_KEPT_BYTES", dice.choice([0, 6, 40]) * ROW_BYTES)
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.005)
    return dice


@pytest.fixture
async def towers(dice) -> list[FakeTower]:
    towers = [FakeTower(preparers=dice.randint(1, 4)) for _ in range(dice.randint(1, 3))]
    for tower in towers:
        tower.rows = ROWS
        tower.depth = dice.randint(1, 2)
        tower.patches = {name: 1 + n % 7 for n, name in enumerate(MEDIA)}
        tower.bad_media = {name: MediaError("not a picture") for name in BAD_MEDIA}
        tower.bad_batch = {name: RuntimeError("out of memory") for name in BAD_BATCH}
        tower.deadly_batch = set(DEADLY)
    return towers


@pytest.fixture
def receivers(dice) -> Receivers:
    return Receivers(dice)


@pytest.fixture
async def service(dice, towers, receivers, metrics) -> EncoderService:
    return EncoderService(
        computations=Computations(
            towers,
            EmbeddingCache(dice.choice([0, 20, 1000]) * ROW_BYTES),
            metrics,
            batch=BatchBounds(patches=20, items=4),
            staged_bytes=20 * ROW_BYTES,
        ),
        urls=UrlReader(receivers, UrlMemory(0), metrics),
        sender=receivers,
        admission=Admission(max_items=64, max_bytes=600),
        metrics=metrics,
        namespace="n",
        name="http://encoder:1",
    )


async def test_everybody_is_answered_and_nothing_is_left(dice, towers, receivers, service):
    asker = Asker(dice, service)
    meddling = asyncio.create_task(meddle(dice, service, towers, asker.live))
    asking = []
    async with asyncio.timeout(120):
        for number in range(REQUESTS):
            asking.append(asyncio.create_task(asker.ask(number)))
            for _ in range(dice.randrange(25)):
                await asyncio.sleep(0)
        await asyncio.gather(*asking)
    meddling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meddling
    for tower in towers:
        tower.alive = True
    tally = asker.tally
    assert tally["delivered"] > REQUESTS / 4, tally
    assert tally["cancelled"] and tally["declined"] and tally["failed"]

    computations = service.computations
    await until(lambda: not any(computations.status()["queue"].values()))
    status = service.status()
    assert (status["requests"], status["items"], status["bytes"]) == (0, 0, 0)
    assert (status["patches_queued"], status["cache"]["pinned_bytes"]) == (0, 0)
    assert not computations._kept
    assert not receivers.open
    assert not any(tower.in_memory for tower in towers)
    sums = {float(sum(name)) for name in GOOD}
    assert all(float(embedding[0, 0]) in sums for embedding in receivers.delivered)
    check_cache(computations.cache)
    await computations.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
