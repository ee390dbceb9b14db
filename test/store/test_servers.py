"""Redis and Mooncake Store, real ones: full, killed, frozen, hostile, back again."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from certificates import Certificate, make
from sglang_epd.errors import ConfigError
from sglang_epd.store import StoreUrl, open_store, shared
from sglang_epd.store.backend import OversizedError, StoreError
from sglang_epd.store.mooncake import MooncakeStore
from sglang_epd.store.redis import RedisStore
from store.fakes import Counts, Open, image, key_of, until, written
from stores import Server, mooncake_master, mooncake_node, redis_server

LAYOUT, EMBEDDING = image()


def address(kind: str, server: Server, query: str = "max_item_mb=8") -> str:
    return f"{kind}://127.0.0.1:{server.port}?{query}"


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


async def test_redis_that_dies_is_missed_and_used_again(tmp_path, open_at: Open, counts: Counts):
    with redis_server(tmp_path) as server:
        store = await open_at(address("redis", server), timeout_s=1.0)
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert await store.find(key_of(1), "IMAGE") is not None
        server.kill()
        for _ in range(10):
            assert await store.find(key_of(1), "IMAGE") is None
        assert counts.reads == {"hit": 1, "error": 5, "skipped": 5}
        server.start()
        await comes_back(store)


async def test_redis_that_hangs_costs_the_bound(redis: Server, open_at: Open, counts: Counts):
    store = await open_at(address("redis", redis), timeout_s=0.1)
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        began = time.perf_counter()
        for _ in range(8):
            assert await store.find(key_of(1), "IMAGE") is None
        assert time.perf_counter() - began < 2.0
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    assert counts.reads == {"timeout": 5, "skipped": 3}
    await comes_back(store)


async def test_redis_that_is_full_refuses_writes_only(tmp_path, open_at: Open, counts: Counts):
    flags = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *flags) as server:
        store = await open_at(address("redis", server))
        layout, embedding = image(tokens=1024, width=512)
        for number in range(4):
            store.keep(key_of(number), layout, embedding)
        await written(counts, 4)
        assert counts.writes["error"] > 0
        kept = [await store.find(key_of(number), "IMAGE") for number in range(4)]
        assert sum(found is not None for found in kept) == counts.writes["written"]
        assert "error" not in counts.reads


async def test_redis_forgets_by_itself(redis: Server, open_at: Open, counts: Counts):
    from redis.asyncio import Redis

    store = await open_at(address("redis", redis, "ttl_s=77&namespace=ttl"))
    store.keep(key_of(1), LAYOUT, EMBEDDING)
    await written(counts)
    async with Redis(port=redis.port) as client:
        (name,) = await client.keys("ttl:*")
        assert 70 < await client.ttl(name) <= 77
        assert name.decode() == f"ttl:v1-open/{key_of(1).hex()}"


async def test_no_more_is_read_from_redis_than_may_be(redis: Server):
    from redis.asyncio import Redis

    store = RedisStore(StoreUrl.parse(address("redis", redis, "namespace=big")))
    async with Redis(port=redis.port) as client:
        await client.set("big:a", bytes(1001))
        await client.lpush("big:list", "no", "string")
    with pytest.raises(OversizedError):
        await store.get("a", 1000)
    found = await store.get("a", 1001)
    assert found is not None and found.nbytes == 1001 and found.flags.writeable
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await store.get("list", 1000)
    await store.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n",
        b"$-7\r\n",
        b"$99999999999999\r\n" + bytes(100_000),
        b"*2147483647\r\n" * 3,
        b"*1\r\n" * 20_000 + b":1\r\n",
        b":7\r\n",
        b"+OK\r\n" * 10,
        b"-ERR no\r\n" * 10,
        b"$5\r\nhello\r\n" * 10,
        b"%1\r\n:1\r\n:2\r\n" * 10,
        b"\xff\x00\xfe",
    ],
)
@pytest.mark.parametrize("ends", [False, True])
async def test_whatever_claims_to_be_redis_is_a_miss(
    open_at: Open, counts: Counts, answer: bytes, ends: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared, "_CONNECT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(answer)
            if ends:
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = await open_at(f"redis://127.0.0.1:{port}", timeout_s=0.05)
        began = time.perf_counter()
        for number in range(3):
            assert await store.find(key_of(number), "IMAGE") is None
        assert time.perf_counter() - began < 2.0
        assert not counts.reads["hit"]
        await store.close()


async def test_a_password_opens_redis_and_a_wrong_one_is_no_error(tmp_path, open_at: Open, counts):
    with redis_server(tmp_path, "--requirepass", "p@ss") as server:
        good = await open_at(f"redis://:p%40ss@127.0.0.1:{server.port}")
        good.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert await good.find(key_of(1), "IMAGE") is not None
        bad = await open_at(f"redis://:wrong@127.0.0.1:{server.port}")
        assert await bad.find(key_of(1), "IMAGE") is None
        assert counts.reads == {"hit": 1, "error": 1}


@asynccontextmanager
async def tls_before(server: Server, certificate: Certificate) -> AsyncIterator[int]:
    """A port that speaks TLS for a server that does not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.certfile, certificate.keyfile)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

        ways = pass_on(reader, inner_writer), pass_on(inner_reader, writer)
        await asyncio.gather(*ways, return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as front:
        yield front.sockets[0].getsockname()[1]


async def test_redis_over_tls_wants_a_certificate_that_is_known(
    redis: Server, tmp_path: Path, open_at: Open, counts: Counts, monkeypatch: pytest.MonkeyPatch
):
    certificate = make(tmp_path)
    async with tls_before(redis, certificate) as port:
        store = await open_at(f"rediss://127.0.0.1:{port}?namespace=tls")
        assert await store.find(key_of(1), "IMAGE") is None
        assert counts.reads == {"error": 1}
        monkeypatch.setenv("SSL_CERT_FILE", certificate.certfile)
        store = await open_at(f"rediss://127.0.0.1:{port}?namespace=tls")
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert await store.find(key_of(1), "IMAGE") is not None
        await store.close()


def test_a_library_that_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch):
    for module, url in (
        ("redis.asyncio", "redis://cache"),
        ("mooncake.store", "mooncake://master:1"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match="pip install"):
            open_store(url, token="", timeout_s=1.0, observer=Counts())


async def test_mooncake_whose_master_dies_is_missed_and_used_again(
    tmp_path: Path, open_at: Open, counts: Counts
):
    with mooncake_master(tmp_path) as master, mooncake_node(tmp_path, master, 64 << 20) as node:
        store = await open_at(address("mooncake", master), timeout_s=1.0)
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert await store.find(key_of(1), "IMAGE") is not None
        master.kill()
        began = time.perf_counter()
        for _ in range(10):
            assert await store.find(key_of(1), "IMAGE") is None
        assert time.perf_counter() - began < 6.0
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
        store = await open_at(address("mooncake", master), timeout_s=1.0)
        assert await store.find(key_of(1), "IMAGE") is None
        assert time.perf_counter() - began < 2.0
        assert counts.reads == {"error": 1}
        master.start()
        with mooncake_node(tmp_path, master, 64 << 20):
            await comes_back(store)


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
        store = await open_at(address("mooncake", master))
        store.keep(key_of(1), LAYOUT, EMBEDDING)
        await written(counts)
        assert counts.writes == {"error": 1}
        assert await store.find(key_of(1), "IMAGE") is None
        assert counts.reads == {"miss": 1}


async def test_many_read_large_embeddings_from_mooncake_at_a_time(
    mooncake: Server, open_at: Open, counts: Counts
):
    """Its buffer has room for as many as it is asked for side by side."""
    store = await open_at(address("mooncake", mooncake, "max_item_mb=4&namespace=large"))
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
        command = [sys.executable, "-c", _ENDS, address("mooncake", master), str(master.pid)]
        ended = subprocess.run(command, capture_output=True, timeout=25, check=False)
        assert ended.stdout.strip() == b"None", ended.stderr[-2000:]
        assert ended.returncode == 0
        assert time.perf_counter() - began < 20
