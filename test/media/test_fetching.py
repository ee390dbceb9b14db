"""A fetcher in a process of its own: it answers as one in this process does, and may be lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from media.samples import Serve, drip, in_seconds, local_limits, raw_server
from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    RequestCancelledError,
    UnavailableError,
)
from sglang_epd.media import Account, FetchingProcess, MediaFetcher, MediaSource, fetching
from waiting import until

PATIENCE_S = 20.0
BODY = random.Random(1).randbytes(3 << 20)


def source(url: str) -> MediaSource:
    return MediaSource(url=url)


def descriptors() -> int:
    """Files, processes and channels: not the connections of the tests' own servers."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread closed it meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    unix = psutil.Process().net_connections("unix")
    return len(unix) + sum("socket:" not in link for link in links)


def relatives() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@asynccontextmanager
async def fetching_process(
    total_timeout_s: float = 3 * PATIENCE_S, **options: Any
) -> AsyncIterator[FetchingProcess]:
    """One that has begun; nothing is left of it afterwards."""
    fds, others = descriptors(), set(relatives())
    limits = local_limits(total_timeout_s=total_timeout_s)
    async with FetchingProcess(limits, **options) as fetcher:
        await fetcher._process()
        family = relatives()
        yield fetcher
        family += relatives()
    assert not psutil.wait_procs(set(family) - others, timeout=PATIENCE_S)[1]
    await until(lambda: descriptors() <= fds)  # the nursery's thread closes its own a little later


def pid(fetcher: FetchingProcess) -> int:
    return fetcher._starting.result()._child.pid


@asynccontextmanager
async def halves() -> AsyncIterator[tuple[str, list[asyncio.Event]]]:
    """A host that sends half of a body, and the other half when its event is set."""
    asked: list[asyncio.Event] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        asked.append(asyncio.Event())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        writer.write(BODY[: len(BODY) // 2])
        await asked[-1].wait()
        writer.write(BODY[len(BODY) // 2 :])
        await writer.drain()

    async with raw_server(answer) as url:
        yield url, asked


async def test_it_answers_as_a_fetcher_in_this_process_does(serve: Serve, tmp_path: Path) -> None:
    async def handle(request: web.Request) -> web.Response:
        kind, _, detail = request.path[1:].partition("/")
        if kind == "body":
            fresh = {"Cache-Control": "max-age=60"}
            return web.Response(body=BODY[: int(detail)], headers=fresh)
        if kind == "to":
            return web.Response(status=302, headers={"Location": request.query.get("url", "/to")})
        return web.Response(status=int(detail))

    file = tmp_path / "picture"
    file.write_bytes(BODY)
    url = await serve(handle)
    limits = local_limits(allowed_local_root=tmp_path, max_bytes=len(BODY), max_redirects=2)
    urls = [
        *(f"{url}/body/{nbytes}" for nbytes in (1, 32 << 10, 100_000, 3 << 20)),
        *(f"{url}/{path}" for path in ("body/0", "status/404", "status/503", "status/201")),
        f"{url}/to?url=/body/7",
        f"{url}/to?url=/to",
        f"{url}/to?url=http://10.0.0.1/",
        "http://127.0.0.1:1/",
        "http://10.0.0.1/",
        "http://[::1]:1/",
        "ftp://127.0.0.1/",
        "http://[",
        *(f"file://{path}" for path in (file, tmp_path / "none", "/etc/passwd")),
    ]

    async def tell(fetcher: MediaFetcher | FetchingProcess, url: str) -> list[object]:
        try:
            answer = await fetcher.ask(source(url))
        except EpdError as error:
            return [type(error), error.message, getattr(error, "reason", "")]
        lives = [step.fresh_until > time.monotonic() + 50 for step in answer.trail.steps]
        steps = [(step.url, step.obstacle) for step in answer.trail.steps]
        return [answer.data, answer.digest, steps, lives]

    async with MediaFetcher(limits) as here, FetchingProcess(limits) as there:
        for one in urls:
            assert await tell(there, one) == await tell(here, one), one
        media = await there.fetch(MediaSource(data=BODY), in_seconds(1))
        assert media.data == BODY


async def test_room_is_asked_for_before_bytes_are_read(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(300_000))

    asked: list[int] = []

    class Asked(Account):
        async def grow(self, nbytes: int) -> None:
            asked.append(nbytes)
            if nbytes > 200_000:
                await asyncio.Event().wait()

    class Closed(Account):
        async def grow(self, nbytes: int) -> None:
            raise RequestCancelledError("it is closed")

    url = await serve(handle)
    async with fetching_process(total_timeout_s=0.5, concurrency=1) as fetcher:
        with pytest.raises(DeadlineError):  # not the host's fault, however long it takes
            await fetcher.fetch(source(url), in_seconds(2), Asked())
        assert asked[0] < 100_000
        assert asked[-1] == 300_000, "no more than was announced"
        with pytest.raises(RequestCancelledError, match="it is closed"):
            await fetcher.ask(source(url), account=Closed())
        assert len((await fetcher.fetch(source(url), in_seconds(PATIENCE_S))).data) == 300_000


async def test_whoever_leaves_leaves_no_connection() -> None:
    gone = asyncio.Event()

    async def endless(writer: asyncio.StreamWriter) -> None:
        try:
            await drip(writer)
        finally:
            gone.set()

    async with raw_server(endless) as url, fetching_process() as fetcher:
        with pytest.raises(DeadlineError, match="deadline passed while reading http://127"):
            await fetcher.fetch(source(f"{url}?token=hunter2"), in_seconds(0.3))
        await asyncio.wait_for(gone.wait(), PATIENCE_S)


async def test_leaving_at_any_moment_leaves_no_descriptor(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    url = await serve(handle)
    async with fetching_process() as fetcher:
        for n in range(60):
            task = asyncio.create_task(fetcher.ask(source(url)))
            await asyncio.wait([task], timeout=n * 0.0005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not fetcher._starting.result()._fetches)
        media = await fetcher.fetch(source(url), in_seconds(PATIENCE_S))
        assert media.data == BODY


async def test_leaving_before_a_thread_reads_the_file_closes_it(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    url = await serve(handle)
    go_on = threading.Event()
    async with fetching_process() as fetcher:
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(go_on.wait)
        task = asyncio.create_task(fetcher.ask(source(url)))
        await until(threads._work_queue.qsize)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_fetch_whose_process_is_struck_is_tried_once_more(
    blow: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetching, "_MISSED_BEATS", 3)
    async with halves() as (url, asked), fetching_process() as fetcher:
        work = asyncio.create_task(fetcher.fetch(source(url), in_seconds(PATIENCE_S)))
        await until(lambda: len(asked) == 1)
        before = pid(fetcher)
        os.kill(before, blow)
        # By no process, and so before one that stands still is missed.
        assert (await fetcher.fetch(MediaSource(data=BODY), in_seconds(PATIENCE_S))).data == BODY
        assert blow == signal.SIGKILL or pid(fetcher) == before
        await until(lambda: len(asked) == 2)
        asked[1].set()
        assert (await work).data == BODY
        assert pid(fetcher) != before
    assert f"(pid {before}) is replaced" in caplog.text


async def test_a_fetch_that_loses_two_processes_fails() -> None:
    async with halves() as (url, asked), fetching_process() as fetcher:
        work = asyncio.create_task(fetcher.fetch(source(url), in_seconds(PATIENCE_S)))
        for n in (1, 2):
            await until(lambda n=n: len(asked) == n)
            os.kill(pid(fetcher), signal.SIGKILL)
        with pytest.raises(UnavailableError, match="process that fetches media has ended") as error:
            await work
        assert error.value.status == 503
        other = asyncio.create_task(fetcher.fetch(source(url), in_seconds(PATIENCE_S)))
        await until(lambda: len(asked) == 3)
        asked[2].set()
        assert (await other).data == BODY


async def test_the_deadline_holds_while_the_process_stands_still(serve: Serve) -> None:
    async with halves() as (url, _), fetching_process() as fetcher:
        os.kill(pid(fetcher), signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(DeadlineError):
            await fetcher.fetch(source(url), in_seconds(0.3))
        assert time.monotonic() - begin < PATIENCE_S / 2


async def test_the_process_that_forks_it_may_be_lost_as_well() -> None:
    async with halves() as (url, asked), fetching_process() as fetcher:
        assert fetcher._nursery.pid is not None
        os.kill(fetcher._nursery.pid, signal.SIGKILL)
        work = asyncio.create_task(fetcher.fetch(source(url), in_seconds(PATIENCE_S)))
        while not work.done():  # the first process may have asked, and the second
            await asyncio.sleep(0.01)
            for one in asked:
                one.set()
        assert (await work).data == BODY


async def test_a_process_that_talks_nonsense_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(fetching, "_MODULE", "liar")
    async with fetching_process() as fetcher:
        with pytest.raises(UnavailableError):
            await fetcher.ask(source("http://127.0.0.1:1/"))
    assert caplog.text.count("malformed message") == 2


async def test_a_process_that_cannot_be_started_is_started_later(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=b"body")

    def fail(*_args: object, **_options: object) -> None:
        raise UnavailableError("a process cannot be started")

    url = await serve(handle)
    with monkeypatch.context() as patch:
        patch.setattr(fetching.Nursery, "child", fail)
        fetcher = FetchingProcess(local_limits())
        await fetcher.__aenter__()
        for _ in range(2):
            with pytest.raises(UnavailableError, match="cannot be started"):
                await fetcher.ask(source(url))
    assert (await fetcher.fetch(source(url), in_seconds(PATIENCE_S))).data == b"body"
    await fetcher.__aexit__()


async def test_two_hundred_slow_hosts(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=BODY[:100_000])

    honest = await serve(handle)
    async with AsyncExitStack() as stack:
        slow = [
            await stack.enter_async_context(raw_server(drip, f"127.0.1.{n}")) for n in range(1, 201)
        ]
        fetcher = await stack.enter_async_context(fetching_process())
        await fetcher.ask(source(honest))
        before = psutil.Process(pid(fetcher)).num_fds()
        fetches = [asyncio.create_task(fetcher.ask(source(url))) for url in slow]
        await until(lambda: psutil.Process(pid(fetcher)).num_fds() > before + 190)
        for _ in range(10):
            begin = time.monotonic()
            assert len((await fetcher.ask(source(honest))).data) == 100_000
            assert time.monotonic() - begin < PATIENCE_S / 2
        connections = psutil.Process(pid(fetcher)).num_fds()
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        await until(lambda: psutil.Process(pid(fetcher)).num_fds() < connections - 190)


async def test_it_can_be_entered_again(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=b"body")

    url = await serve(handle)
    fetcher = FetchingProcess(local_limits())
    for _ in range(2):
        async with fetcher:
            assert (await fetcher.fetch(source(url), in_seconds(PATIENCE_S))).data == b"body"
