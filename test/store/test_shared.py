"""Best effort: whatever the store does, asking it costs bounded time and no error."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from sglang_epd.store import shared
from sglang_epd.store.backend import BreakerState, OversizedError, StoreError
from store.fakes import Counts, image, key_of, sealed, written
from waiting import until

LAYOUT, EMBEDDING = image()
NBYTES = EMBEDDING.nbytes


async def test_a_hit_comes_back(fake, backend, counts: Counts):
    store = fake()
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    await written(counts)
    found = await store.find(key_of(1), "IMAGE")
    assert found is not None and torch.equal(found.embedding, EMBEDDING)
    assert found.layout == LAYOUT
    status = store.status()
    assert status["kind"] == "file"
    assert (status["reads_hit"], status["writes_written"], status["queued"]) == (1, 1, 0)


async def test_keeping_takes_no_time_and_happens_behind(fake, backend, counts: Counts):
    store = fake()
    backend.gate.clear()
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    assert not backend.calls
    await until(lambda: backend.calls)
    assert store.status()["queued_bytes"] == NBYTES
    backend.gate.set()
    await written(counts)
    assert store.status()["queued_bytes"] == 0


async def test_a_slow_store_is_a_miss_within_the_bound(fake, backend, counts: Counts):
    store = fake(timeout_s=0.05)
    backend.gate.clear()
    began = time.perf_counter()
    # More than are read at a time: who waits for his turn waits no longer.
    found = await asyncio.gather(*(store.find(key_of(n), "IMAGE") for n in range(20)))
    assert time.perf_counter() - began < 10.0
    assert found == [None] * 20
    # The others gave up by themselves or, on a machine that paused, when the store was given up.
    assert counts.reads.pop("timeout") == 8
    assert counts.reads.keys() <= {"busy", "skipped"}
    assert counts.reads.total() == 12
    assert store.breakers["reads"].state is BreakerState.OPEN


async def test_who_only_waited_for_his_turn_says_nothing_about_the_store(fake, backend, counts):
    # Half of it is for a turn: a busy machine has the other half to open the gate in.
    store = fake(timeout_s=6.0)
    backend.gate.clear()
    asked = [asyncio.create_task(store.find(key_of(n), "IMAGE")) for n in range(20)]
    await until(lambda: counts.reads["busy"] == 12)
    backend.gate.set()
    await asyncio.gather(*asked)
    assert counts.reads == {"busy": 12, "miss": 8}
    assert store.breakers["reads"].state is BreakerState.CLOSED


@pytest.mark.parametrize("error", [StoreError("down"), RuntimeError("a bug"), MemoryError()])
async def test_a_dead_store_is_left_alone_and_tried_again(
    fake, backend, counts: Counts, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    store = fake()
    backend.error = error
    for number in range(10):
        assert await store.find(key_of(number), "IMAGE") is None
    assert counts.reads == {"error": 5, "skipped": 5}
    assert len(backend.calls) == 5
    backend.error = None
    store.breakers["reads"]._open_until = 0.0  # the pause is over
    backend.held[store._name(key_of(1))] = sealed(key_of(1), LAYOUT, EMBEDDING)
    monkeypatch.setattr(shared.time, "time", lambda: 1.7e9)
    assert await store.find(key_of(1), "IMAGE") is not None
    assert store.breakers["reads"].state is BreakerState.CLOSED


async def test_a_store_that_may_only_be_read_is_read(fake, backend, counts: Counts):
    store = fake()
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    await written(counts)
    backend.error = StoreError("read-only")
    for number in range(2, 12):
        store.keep(key_of(number), LAYOUT, EMBEDDING)
    await written(counts, 11)
    assert store.breakers["writes"].state is BreakerState.OPEN
    assert counts.writes["error"] >= 5 and counts.writes["skipped"] > 0
    backend.error = None
    assert await store.find(key_of(1), "IMAGE") is not None


async def test_writes_past_the_queue_are_dropped_and_counted(fake, backend, counts: Counts):
    store = fake("max_item_mb=1&queue_mb=1&max_mb=1")
    backend.gate.clear()
    layout, embedding = image(tokens=256, width=512)  # half of the queue
    for number in range(5):
        store.keep(key_of(number), layout, embedding)
    assert counts.writes == {"dropped": 3}
    assert store.status()["queued_bytes"] == 2 * embedding.nbytes
    backend.gate.set()
    await written(counts, 5)
    assert counts.writes == {"dropped": 3, "written": 2}
    store.keep(key_of(9), layout, embedding)
    await written(counts, 6)
    assert counts.writes["written"] == 3


async def test_one_key_waits_once(fake, backend, counts: Counts):
    store = fake()
    backend.gate.clear()
    for _ in range(5):
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        store.keep(key_of(2), LAYOUT, EMBEDDING)
        await asyncio.sleep(0)
    assert store.status()["queued_bytes"] == 2 * NBYTES
    backend.gate.set()
    await written(counts, 2)
    assert counts.writes == {"written": 2}


async def test_a_write_that_hangs_is_given_up(fake, backend, counts, monkeypatch):
    monkeypatch.setattr(shared, "_WRITE_S", 0.02)
    store = fake()
    backend.gate.clear()
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    await written(counts)
    assert counts.writes == {"timeout": 1}
    assert store.status()["queued_bytes"] == 0


async def test_what_cannot_be_sealed_ends_no_writer(fake, backend, counts: Counts):
    store = fake()
    store.keep(key_of(1), LAYOUT, EMBEDDING[:1])
    store.keep(key_of(2), LAYOUT, EMBEDDING)
    await written(counts, 2)
    assert counts.writes == {"error": 1, "written": 1}


async def test_a_corrupt_entry_is_removed_before_it_is_written_anew(fake, backend, counts):
    store = fake()
    name = store._name(key_of(1))
    backend.held[name] = b"nonsense"
    assert await store.find(key_of(1), "IMAGE") is None
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    await written(counts, 2)
    assert [call for call in backend.calls if call[0] != "get"] == [("remove", name), ("put", name)]
    assert await store.find(key_of(1), "IMAGE") is not None
    assert counts.reads == {"corrupt": 1, "hit": 1}
    assert counts.writes == {"removed": 1, "written": 1}


async def test_a_corrupt_entry_that_cannot_be_removed_costs_the_bound(fake, backend, counts):
    store = fake(timeout_s=0.1)
    backend.held[store._name(key_of(1))] = b"nonsense"

    async def hang(_name: str) -> None:
        await asyncio.sleep(60)

    backend.remove = hang
    async with asyncio.timeout(5):
        assert await store.find(key_of(1), "IMAGE") is None
    assert counts.reads == {"corrupt": 1}
    assert counts.writes == {"timeout": 1}


async def test_what_is_too_large_to_read_says_nothing_about_the_store(fake, backend, counts):
    store = fake()
    backend.error = OversizedError("large")
    for number in range(10):
        assert await store.find(key_of(number), "IMAGE") is None
    assert counts.reads == {"too_large": 10}


async def test_closing_gives_writes_a_moment(fake, backend, counts: Counts):
    store = fake()
    for number in range(10):
        store.keep(key_of(number), LAYOUT, EMBEDDING)
    await store.close()
    assert counts.writes == {"written": 10}
    assert backend.closed
    store.keep(key_of(11), LAYOUT, EMBEDDING)
    assert counts.writes["dropped"] == 1


async def test_closing_waits_for_no_store_that_hangs(fake, backend, counts, monkeypatch):
    monkeypatch.setattr(shared, "_LAST_WRITES_S", 0.05)
    monkeypatch.setattr(shared, "_LAST_WORDS_S", 0.05)
    store = fake()
    backend.gate.clear()
    for number in range(10):
        store.keep(key_of(number), LAYOUT, EMBEDDING)
    began = time.perf_counter()
    await store.close()
    assert time.perf_counter() - began < 10.0
    assert counts.writes == {"dropped": 10}
    assert store.status()["queued_bytes"] == 0


async def test_who_leaves_leaves_the_probe_to_the_next(fake, backend, counts):
    store = fake()
    backend.error = StoreError("down")
    for number in range(5):
        await store.find(key_of(number), "IMAGE")
    backend.error = None
    store.breakers["reads"]._open_until = 0.0  # the pause is over
    backend.gate.clear()
    probe = asyncio.create_task(store.find(key_of(1), "IMAGE"))
    await until(lambda: len(backend.calls) == 6)
    assert await store.find(key_of(2), "IMAGE") is None  # skipped
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    backend.gate.set()
    assert await store.find(key_of(3), "IMAGE") is None
    assert counts.reads["miss"] == 1
    assert store.breakers["reads"].state is BreakerState.CLOSED
