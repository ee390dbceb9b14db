"""A shared store before the towers: asked once for all who want one embedding, filled behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from encoder.towers import WIDTH, FakeTower, key_of, settle, states, until, value
from sglang_epd.encoder.pipeline import computations as module
from sglang_epd.encoder.pipeline.work import MediaNeededError
from sglang_epd.errors import UnavailableError
from sglang_epd.store import SharedStore, StoreUrl
from sglang_epd.store.backend import StoreError
from sglang_epd.wire.messages import Layout, TensorSpec
from store.fakes import Counts, FakeBackend, written

LAYOUT = Layout("IMAGE", TensorSpec("float32", (1, WIDTH)), [[1, 1, 1]])

pytestmark = pytest.mark.parametrize(
    "towers", [1, 2], ids=["one tower", "two towers"], indirect=True
)


@pytest.fixture
async def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def counts() -> Counts:
    return Counts()


@pytest.fixture
async def store(backend: FakeBackend, counts: Counts) -> AsyncIterator[SharedStore]:
    url = StoreUrl.parse("file:///nowhere")
    store = SharedStore(backend, url, token="", timeout_s=5.0, observer=counts)
    yield store
    backend.gate.set()
    backend.error = None
    await store.close()


@pytest.fixture(params=[0, 1 << 30], ids=["no cache", "cache"])
def bounds(request: pytest.FixtureRequest, store: SharedStore) -> dict[str, Any]:
    return {"capacity": request.param, "store": store}


@pytest.fixture
async def held(store: SharedStore, counts: Counts) -> float:
    """What the store has for the item `x`."""
    store.keep(key_of(b"x"), LAYOUT, torch.full((1, WIDTH), 7.0))
    await written(counts)
    return 7.0


def preparations(towers: list[FakeTower]) -> list[bytes]:
    return [name for tower in towers for name in tower.preparations]


def gets(backend: FakeBackend) -> int:
    return sum(what == "get" for what, _name in backend.calls)


@pytest.mark.parametrize("media", [True, False], ids=["media", "without media"])
async def test_what_is_stored_is_neither_prepared_nor_run(
    towers, computations, held, counts, ask, count, media
):
    assert computations.at_hand(key_of(b"x"))
    hold = ask(b"x", media=media)
    assert (await hold.layout()) == LAYOUT
    assert await value(hold) == held
    assert (hold.source, set(hold.ms)) == ("stored", {"store"})
    assert not preparations(towers)
    assert count("lookups_total", source="stored") == 1
    assert count("lookups_total", source="computed") == 0
    await asyncio.sleep(0.01)
    assert counts.writes == {"written": 1}, "what came from there is not written there"


async def test_what_is_not_is_made_and_stored_behind_the_answer(
    store, counts, computations, ask, count
):
    hold = ask(b"ab")
    assert await value(hold) == sum(b"ab")
    assert hold.source == "computed"
    assert {"store", "wait", "preprocess", "queue", "forward"} == set(hold.ms)
    await written(counts)
    assert await store.find(key_of(b"ab"), "IMAGE") is not None
    assert count("lookups_total", source="computed") == 1
    assert computations.status()["store"]["writes_written"] == 1


async def test_a_write_that_fails_fails_no_answer(backend, counts, ask):
    await value(ask(b"a"))
    await written(counts)
    calls = len(backend.calls)
    backend.error = StoreError("full")
    assert await value(ask(b"b")) == sum(b"b")
    await written(counts, 2)
    assert counts.writes["error"] == 1
    assert len(backend.calls) > calls


async def test_many_askers_of_one_key_ask_the_store_once(backend, held, ask, count):
    backend.gate.clear()
    holds = [ask(b"x", f"r{number}") for number in range(24)]
    await settle()
    assert gets(backend) == 1
    backend.gate.set()
    assert await asyncio.gather(*map(value, holds)) == [held] * 24
    assert [hold.source for hold in holds] == ["stored"] + ["coalesced"] * 23
    assert count("lookups_total", source="coalesced") == 23


async def test_those_who_leave_leave_nothing_behind(backend, held, computations, ask):
    backend.gate.clear()
    gone, missing = ask(b"x"), ask(b"y")
    await settle()
    assert states(computations) == {"looking": 2}
    gone.release()
    missing.release()
    backend.gate.set()
    await until(lambda: not states(computations))
    assert len(computations.cache) == (1 if computations.cache.capacity_bytes else 0)


async def test_what_waits_to_be_written_keeps_nothing_of_its_batch(towers, ask):
    holds = [ask(name) for name in (b"a1", b"a2", b"a3")]
    await asyncio.gather(*map(value, holds))
    assert max(len(batch) for tower in towers for batch in tower.batches) > 1
    for hold in holds:
        embedding = await hold.embedding()
        assert embedding.untyped_storage().nbytes() == embedding.nbytes


@pytest.mark.parametrize("error", [StoreError("down"), RuntimeError("a bug in a library")])
async def test_a_dead_store_costs_an_attempt_and_nothing_else(backend, ask, error):
    backend.error = error
    holds = [ask(bytes([65 + number])) for number in range(12)]
    assert await asyncio.gather(*map(value, holds)) == [65.0 + number for number in range(12)]
    assert {hold.source for hold in holds} == {"computed"}


@pytest.mark.parametrize("media", [True, False], ids=["media", "without media"])
async def test_who_asks_while_the_encoder_ends_is_told(backend, computations, ask, media):
    backend.gate.clear()
    hold = ask(b"x", media=media)
    await settle()
    closing = asyncio.create_task(computations.close())
    await settle()
    backend.gate.set()
    await closing
    with pytest.raises(UnavailableError if media else MediaNeededError):
        await hold.embedding()
    with pytest.raises(UnavailableError):
        await ask(b"x", looked=True).embedding()


@pytest.mark.parametrize("media", [True, False], ids=["media", "without media"])
async def test_what_was_given_away_for_room_is_fetched_again(
    held, computations, ask, towers, monkeypatch, media
):
    """Nobody had memory for it, and then somebody has. No media are read because of that."""
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    hold = ask(b"x", media=media)
    await value(hold)
    hold.want(False)
    computations.cache.clear()
    hold.want(True)
    assert await value(hold) == held
    assert not preparations(towers)


# Who asks without media


async def test_what_is_not_is_asked_for_once_and_then_made(
    towers, backend, computations, ask, count
):
    without = ask(b"x", media=False)
    with pytest.raises(MediaNeededError):
        await without.layout()
    assert set(without.ms) == {"store"}
    assert count("lookups_total", source="computed") == 0
    assert not computations.at_hand(key_of(b"x"), looked=True)
    hold = ask(b"x", looked=True)
    assert await value(hold) == sum(b"x")
    assert hold.source == "computed"
    assert "store" not in hold.ms
    assert gets(backend) == 1
    assert count("lookups_total", source="computed") == 1
    assert preparations(towers) == [b"x"]


async def test_who_comes_with_media_serves_those_who_have_none(towers, backend, ask, count):
    backend.gate.clear()
    without = [ask(b"x", f"r{number}", media=False) for number in range(3)]
    await settle()
    hold = ask(b"x", "r3")
    hold.release()
    await settle()
    backend.gate.set()
    assert await asyncio.gather(*map(value, without)) == [sum(b"x")] * 3
    assert [hold.source for hold in without] == ["computed", "coalesced", "coalesced"]
    assert preparations(towers) == [b"x"]
    assert gets(backend) == 1
    assert count("lookups_total", source="computed") == 1


async def test_each_of_those_who_have_none_is_told(backend, computations, ask):
    backend.gate.clear()
    holds = [ask(b"x", f"r{number}", media=False) for number in range(3)]
    gone = ask(b"x", "r3", media=False)
    await settle()
    # Not for who has been told already: he would wait for the same answer again.
    assert computations.at_hand(key_of(b"x"))
    assert not computations.at_hand(key_of(b"x"), looked=True)
    gone.release()
    backend.gate.set()
    told = await asyncio.gather(*(hold.embedding() for hold in holds), return_exceptions=True)
    assert {type(error) for error in told} == {MediaNeededError}
    assert len(set(map(id, told))) == 3
    assert not computations.at_hand(key_of(b"x"), looked=True)


async def test_a_store_that_is_left_alone_is_not_asked_first(backend, computations, ask):
    backend.error = StoreError("down")
    for number in range(5):
        assert computations.at_hand(key_of(b"x"))
        with pytest.raises(MediaNeededError):
            await ask(bytes([65 + number]), media=False).embedding()
    assert not computations.at_hand(key_of(b"x"))
    assert gets(backend) == 5
