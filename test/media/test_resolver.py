"""Names whose servers never answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_epd.media import resolver as module
from sglang_epd.media.resolver import SystemResolver
from waiting import until

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]
PATIENCE_S = 10.0


class Names:
    """`getaddrinfo`, which never answers for hosts named "hang"."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []
        self.failure: OSError | None = None
        self.slow = False

    def __call__(self, host: str, _port: int, _family: int) -> list[Any]:
        self.asked.append(host)
        if self.failure is not None:
            raise self.failure
        if self.slow:
            self.release.wait(PATIENCE_S * 6)
        if host.startswith("hang"):
            self.release.wait(PATIENCE_S * 6)
            raise OSError("no answer")
        return FOUND


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    monkeypatch.setattr(module, "_WAIT_S", 0.3)
    names = Names()
    yield names
    names.release.set()


async def hang(resolver: SystemResolver, names: Names, hosts: list[str]) -> list[asyncio.Task]:
    tasks = [asyncio.create_task(resolver.resolve(host)) for host in hosts]
    await until(lambda: set(hosts) <= set(names.asked))
    return tasks


async def test_names_of_one_domain_have_a_share_of_the_threads(names: Names) -> None:
    resolver = SystemResolver(threads=4, look_up=names)
    held = await hang(resolver, names, ["hang1.evil.example", "hang2.evil.example"])
    with pytest.raises(OSError, match="too many look-ups"):
        await resolver.resolve("hang3.EVIL.example.")
    assert names.asked == ["hang1.evil.example", "hang2.evil.example"]
    async with asyncio.timeout(PATIENCE_S):
        assert (await resolver.resolve("good.example"))[0]["host"] == "127.0.0.1"
        names.release.set()
        results = await asyncio.gather(*held, return_exceptions=True)
        assert [type(result) for result in results] == [OSError, OSError]
        assert await resolver.resolve("good.evil.example")


async def test_a_domain_under_a_countrys_is_one_of_many(names: Names) -> None:
    resolver = SystemResolver(threads=4, look_up=names)
    held = await hang(resolver, names, ["hang1.evil.co.uk", "hang2.evil.co.uk"])
    with pytest.raises(OSError, match="too many look-ups"):
        await resolver.resolve("hang3.evil.co.uk")
    async with asyncio.timeout(PATIENCE_S):
        assert await resolver.resolve("good.co.uk")
        assert await resolver.resolve("www.good.co.uk")
        names.release.set()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_known_name_keeps_its_addresses_while_all_threads_are_taken(names: Names) -> None:
    resolver = SystemResolver(threads=2, look_up=names)
    known = await resolver.resolve("good.example")
    held = await hang(resolver, names, ["hang.one.example", "hang.two.example"])
    async with asyncio.timeout(PATIENCE_S):
        assert await resolver.resolve("good.example") == known
        assert names.asked.count("good.example") == 1
        with pytest.raises(OSError, match="too many look-ups"):
            await resolver.resolve("new.example")
        names.release.set()
        await asyncio.gather(*held, return_exceptions=True)
        assert await resolver.resolve("good.example") == known
    assert names.asked.count("good.example") == 2, "asked again once there is a thread"


async def test_a_fetch_that_was_given_up_still_counts_its_thread(names: Names) -> None:
    """aiohttp lets a look-up go on when the fetch that began it has left."""
    resolver = SystemResolver(threads=1, look_up=names)
    (held,) = await hang(resolver, names, ["hang.example"])
    with pytest.raises(OSError, match="too many look-ups"):
        await resolver.resolve("new.example")
    names.release.set()
    await asyncio.gather(held, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        assert await resolver.resolve("new.example")


async def test_an_impossible_name_has_no_addresses() -> None:
    with pytest.raises(OSError, match="not a host name"):
        await SystemResolver().resolve("a" * 80 + ".example")


async def test_a_known_name_keeps_its_addresses_while_name_servers_fail(names: Names) -> None:
    resolver = SystemResolver(look_up=names)
    known = await resolver.resolve("good.example")
    names.failure = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert await resolver.resolve("good.example") == known
    with pytest.raises(socket.gaierror, match="try again"):
        await resolver.resolve("new.example")
    names.failure = socket.gaierror(socket.EAI_NONAME, "no such name")
    with pytest.raises(socket.gaierror, match="no such name"):
        await resolver.resolve("good.example")


async def test_a_known_name_waits_briefly_for_servers_that_are_silent(names: Names) -> None:
    resolver = SystemResolver(look_up=names)
    known = await resolver.resolve("good.example")
    names.slow = True
    async with asyncio.timeout(PATIENCE_S):
        many = await asyncio.gather(*(resolver.resolve("good.example") for _ in range(8)))
        assert many == [known] * 8
        assert await resolver.resolve("good.example") == known
    assert names.asked == ["good.example"] * 2, "asked by one thread for all of them"
