"""Mooncake Store, a real one: full, killed, frozen, hostile, back again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_epd.errors import ConfigError
from sglang_epd.store import StoreUrl, open_store, shared
from sglang_epd.store.backend import StoreError
from sglang_epd.store.mooncake import MooncakeStore
from store.fakes import Counts, Open, image, key_of, written
from stores import Server, mooncake_master, mooncake_node
from waiting import until

LAYOUT, EMBEDDING = image()


def address(server: Server, query: str = "max_item_mb=8") -> str:
    return f"mooncake://127.0.0.1:{server.port}?{query}"


async def comes_back(store: shared.SharedStore) -> None:
    """Asked again and again, the store is used again; sooner here than in life."""

    async def answers() -> bool:
        for breaker in store.breakers.values():
            breaker._open_until = 0.0
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        return await store.find(key_of(1), "IMAGE") is not None

    async with asyncio.timeout(20):
        while not await answers():
            await asyncio.sleep(0.05)


def test_a_library_that_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="pip install"):
        open_store("mooncake://master:1", token="", timeout_s=1.0, observer=Counts())


async def test_mooncake_whose_master_dies_is_missed_and_used_again(
    tmp_path: Path, open_at: Open, counts: Counts
):
    with mooncake_master(tmp_path) as master, mooncake_node(tmp_path, master, 64 << 20) as node:
        store = await open_at(address(master), timeout_s=1.0)
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert await store.find(key_of(1), "IMAGE") is not None
        master.kill()
        began = time.perf_counter()
        for _ in range(10):
            assert await store.find(key_of(1), "IMAGE") is None
        # Five time out, of a second each.
        assert time.perf_counter() - began < 9.0
        assert counts.reads["hit"] == 1 and counts.reads["skipped"] == 5
        master.start()
        await comes_back(store)
        node.kill()
        node.wait()
        # The master still believes in it.
        assert await store.find(key_of(1), "IMAGE") is None


async def test_mooncake_without_a_master_is_no_error_and_connects_later(
    tmp_path: Path, open_at: Open, counts: Counts
):
    with mooncake_master(tmp_path) as master:
        master.kill()
        began = time.perf_counter()
        store = await open_at(address(master), timeout_s=1.0)
        assert await store.find(key_of(1), "IMAGE") is None
        assert time.perf_counter() - began < 8.0
        assert counts.reads == {"error": 1}
        master.start()
        with mooncake_node(tmp_path, master, 64 << 20):
            await comes_back(store)


@pytest.mark.parametrize("code", [-703, -704])
async def test_what_mooncake_is_being_given_is_not_there_yet(code: int):
    """By its documented codes: REPLICA_IS_NOT_READY and OBJECT_NOT_FOUND. No call of its Python
    client leaves an object half put."""
    store = MooncakeStore(StoreUrl.parse("mooncake://127.0.0.1:1"))
    store._client = SimpleNamespace(get_size=lambda _name: code, remove=lambda *_args: code)
    assert await store.get("name", 1 << 20) is None
    await store.remove("name")
    store._client = SimpleNamespace(get_size=lambda _name: -702, close=lambda: 0)
    with pytest.raises(StoreError, match="-702"):
        await store.get("name", 1 << 20)
    await store.close()


async def test_a_mooncake_client_that_came_late_is_kept(monkeypatch: pytest.MonkeyPatch):
    store = MooncakeStore(StoreUrl.parse("mooncake://127.0.0.1:1"))
    made = []

    def setup() -> object:
        time.sleep(0.1)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(store, "_setup", setup)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await store.connect()
    await until(lambda: made)
    await asyncio.gather(store.connect(), store.connect())
    assert len(made) == 1
    assert store._client is made[0]
    store._client = None
    await store.close()


async def test_mooncake_without_room_refuses_writes_only(
    tmp_path: Path, open_at: Open, counts: Counts
):
    with mooncake_master(tmp_path) as master:
        store = await open_at(address(master))
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert counts.writes == {"error": 1}
        assert await store.find(key_of(1), "IMAGE") is None
        assert counts.reads == {"miss": 1}


async def test_many_read_large_embeddings_from_mooncake_at_a_time(
    mooncake: Server, open_at: Open, counts: Counts
):
    """Its buffer has room for as many as it is asked for side by side."""
    store = await open_at(address(mooncake, "max_item_mb=4&namespace=large"))
    layout, embedding = image(tokens=1024, width=1000)  # 4 MB
    for number in range(4):
        store.keep(key_of(number), layout, embedding)
    await written(counts, 4)
    found = await asyncio.gather(*(store.find(key_of(n % 4), "IMAGE") for n in range(24)))
    assert all(one is not None and torch.equal(one.embedding, embedding) for one in found)


_ENDS = """
import asyncio, os, signal, sys
from sglang_epd.store import open_store
async def main():
    store = open_store(sys.argv[1], token="", timeout_s=0.2, observer=lambda *_: None)
    await store.connect()
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    print(await store.find(bytes(32), "IMAGE"), flush=True)
    await store.close()
asyncio.run(main())
"""


@pytest.mark.servers
def test_a_process_ends_although_its_store_hangs(tmp_path: Path):
    with mooncake_master(tmp_path) as master, mooncake_node(tmp_path, master, 64 << 20):
        began = time.perf_counter()
        command = [sys.executable, "-c", _ENDS, address(master), str(master.pid)]
        ended = subprocess.run(command, capture_output=True, timeout=25, check=False)
        assert ended.stdout.strip() == b"None", ended.stderr[-2000:]
        assert ended.returncode == 0
        assert time.perf_counter() - began < 20
