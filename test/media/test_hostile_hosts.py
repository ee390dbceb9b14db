"""Hosts that send what is dear to read, or next to nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from media.samples import Serve, drip, in_seconds, local_limits, raw_server
from sglang_epd.errors import DeadlineError, MediaError
from sglang_epd.media import Account, MediaFetcher, MediaSource, slots
from sglang_epd.media.guarded_socket import GuardedSocket

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PATIENCE_S = 20.0


def chunks(size: int, count: int) -> bytes:
    return (b"%x\r\n" % size + bytes(size) + b"\r\n") * count


async def fetch(url: str) -> bytes:
    async with MediaFetcher(local_limits(total_timeout_s=PATIENCE_S)) as fetcher:
        return (await fetcher.fetch(MediaSource(url=url), in_seconds(PATIENCE_S))).data


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a fetcher's socket."""
    reads: list[int] = []
    note = GuardedSocket._note

    def noting(guarded: GuardedSocket, count: int) -> None:
        reads.append(count)
        note(guarded, count)

    monkeypatch.setattr(GuardedSocket, "_note", noting)
    return reads


async def test_an_answer_in_tiny_chunks_is_refused_early(taken: list[int]) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await asyncio.sleep(0.1)  # the answer has begun, and what comes is its body
        while True:
            writer.write(chunks(1, 12_000))
            await writer.drain()

    async with raw_server(answer) as url:
        with pytest.raises(MediaError, match="in tiny chunks") as caught:
            await fetch(url)
    assert caught.value.reason == "chunks"
    assert sum(taken) <= 8 << 10, "thousands of chunks were parsed for nothing"


async def test_reads_of_a_body_in_chunks_grow_with_it(taken: list[int]) -> None:
    body = chunks(4096, 500) + b"0\r\n\r\n"
    async with raw_server(CHUNKED + body) as url:
        assert len(await fetch(url)) == 500 * 4096
    before = 0
    for count in taken:
        assert count <= 2048 + before // 16
        before += count
    assert max(taken) > 32 << 10


@pytest.mark.parametrize(
    "pieces", [[(1024, 2000)], [(4096, 500)], [(1, 60), (16384, 50)], [(300, 5000)]], ids=str
)
async def test_chunks_of_honest_servers_pass(pieces: list[tuple[int, int]]) -> None:
    body = b"".join(chunks(size, count) for size, count in pieces) + b"0\r\n\r\n"
    async with raw_server(CHUNKED + body) as url:
        assert len(await fetch(url)) == sum(size * count for size, count in pieces)


async def test_a_flood_of_interim_answers_is_broken_off() -> None:
    taken = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        while True:
            writer.write(b"HTTP/1.1 103 \r\n\r\n" * 1000)
            await writer.drain()
            taken += 17_000

    async with raw_server(answer) as url:
        with pytest.raises(MediaError) as caught:
            await fetch(url)
    assert caught.value.reason == "broken"
    assert taken < 32 << 20


async def test_some_interim_answers_pass() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n" * 20
    async with raw_server(interim + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody") as url:
        assert await fetch(url) == b"body"


@pytest.mark.parametrize("nbytes", [4, 300_000])
async def test_a_connection_that_is_reused_takes_in_as_much_again(
    serve: Serve, nbytes: int
) -> None:
    peers = set()

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=bytes(nbytes), headers={"X-Long": "x" * 7000})

    url = await serve(handle)
    async with MediaFetcher(local_limits()) as fetcher:
        for _ in range(20):
            media = await fetcher.fetch(MediaSource(url=url), in_seconds(PATIENCE_S))
            assert len(media.data) == nbytes
    assert len(peers) == 1


async def test_waiting_for_room_is_not_the_hosts_fault(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(300_000))

    waits = [3.5, 2.0, 60.0]

    class Full(Account):
        async def grow(self, _nbytes: int) -> None:
            await asyncio.sleep(waits.pop(0))

    source = MediaSource(url=await serve(handle))
    async with MediaFetcher(local_limits(total_timeout_s=3.0)) as fetcher:
        with pytest.raises(DeadlineError):
            await fetcher.fetch(source, in_seconds(9), Full())
        assert waits == []
        media = await fetcher.fetch(source, in_seconds(PATIENCE_S))
        assert len(media.data) == 300_000


# Slots


async def steady(writer: asyncio.StreamWriter) -> None:
    """A million bytes a second, for two seconds."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n")
    for _ in range(100):
        writer.write(bytes(20_000))
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GRACE_S", 0.3)


async def test_slow_hosts_of_many_names_make_way(serve: Serve, hasty: None) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=b"body")

    honest = await serve(handle)
    limits = local_limits(total_timeout_s=PATIENCE_S)
    async with AsyncExitStack() as stack:
        slow = [
            await stack.enter_async_context(raw_server(drip, f"127.0.1.{n}")) for n in range(1, 13)
        ]
        fast = await stack.enter_async_context(raw_server(steady))
        fetcher = await stack.enter_async_context(MediaFetcher(limits, concurrency=4))
        begin = time.monotonic()
        kept = asyncio.create_task(fetcher.fetch(MediaSource(url=fast), in_seconds(PATIENCE_S)))
        await asyncio.sleep(0.05)
        hostile = [
            asyncio.create_task(fetcher.fetch(MediaSource(url=url), in_seconds(PATIENCE_S)))
            for url in slow
        ]
        await asyncio.sleep(0.05)
        for _ in range(3):
            media = await fetcher.fetch(MediaSource(url=honest), in_seconds(PATIENCE_S))
            assert media.data == b"body"
        assert time.monotonic() - begin < PATIENCE_S / 2, "they kept their slots to the limit"
        assert len((await kept).data) == 2_000_000
        # Some have a slot, which nobody waits for any more.
        left = [task for task in hostile if not task.done()]
        for task in left:
            task.cancel()
        results = await asyncio.gather(*hostile, return_exceptions=True)
        reasons = [result.reason for result in results if isinstance(result, MediaError)]
        assert set(reasons) == {"slow"}
        assert len(reasons) + len(left) == len(slow)
        assert left


class Of(Account):
    """The account of a request."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    @property
    def owner(self) -> int:
        return self._owner


async def silent(_writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def test_a_request_does_not_wait_for_the_slots_of_others(serve: Serve) -> None:
    """Of 40 URLs, whose hosts say nothing; none of them is given up so soon."""

    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=b"body")

    honest = await serve(handle)
    async with AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(raw_server(silent, f"127.0.1.{n}"))
            for n in range(1, 11)
        ]
        limits = local_limits(total_timeout_s=PATIENCE_S * 3)
        fetcher = await stack.enter_async_context(MediaFetcher(limits, concurrency=12, per_host=4))
        others = [
            asyncio.create_task(
                fetcher.fetch(MediaSource(url=f"{url}/{n}"), in_seconds(60), Of(n % 2))
            )
            for url in hosts
            for n in range(4)
        ]
        await asyncio.sleep(0.1)
        for owner in range(2, 5):
            source = MediaSource(url=f"{honest}/small")
            media = await fetcher.fetch(source, in_seconds(PATIENCE_S), Of(owner))
            assert media.data == b"body"
        assert not any(task.done() for task in others)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_a_slow_host_that_nobody_waits_for_has_its_time(hasty: None) -> None:
    async with raw_server(drip) as url, MediaFetcher(local_limits(total_timeout_s=0.8)) as fetcher:
        with pytest.raises(MediaError) as caught:
            await fetcher.fetch(MediaSource(url=url), in_seconds(PATIENCE_S))
    assert caught.value.reason == "timeout"


async def test_no_fetch_makes_way_for_its_own_request(hasty: None) -> None:
    limits = local_limits(total_timeout_s=0.8)
    async with raw_server(drip) as url, MediaFetcher(limits, concurrency=2) as fetcher:
        results = await asyncio.gather(
            *(
                fetcher.fetch(MediaSource(url=f"{url}/{n}"), in_seconds(PATIENCE_S), Of(1))
                for n in range(2)
            ),
            return_exceptions=True,
        )
    assert [getattr(result, "reason", result) for result in results] == ["timeout"] * 2


async def test_large_bodies_take_turns(taken: list[int]) -> None:
    """A small body waits for several turns of the event loop, so that those must be short."""
    hosts, nbytes = 32, 4 << 20
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % nbytes
    turns: list[int] = []

    async def watch() -> None:
        while True:
            before = len(taken)
            await asyncio.sleep(0)
            turns.append(sum(taken[before:]))

    async with raw_server(head + bytes(nbytes)) as url:
        watching = asyncio.create_task(watch())
        async with MediaFetcher(local_limits(total_timeout_s=PATIENCE_S)) as fetcher:
            fetches = (
                fetcher.fetch(MediaSource(url=f"{url}/{number}"), in_seconds(PATIENCE_S))
                for number in range(hosts)
            )
            media = await asyncio.gather(*fetches)
        watching.cancel()
    assert [len(one.data) for one in media] == [nbytes] * hosts
    # All are large when half of the bytes are here.
    while sum(turns) > hosts * nbytes / 2:
        turns.pop(0)
    assert max(turns) <= 512 << 10, "a small body would wait for megabytes in each turn"
