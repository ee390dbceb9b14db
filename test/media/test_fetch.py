from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import os
import resource
import socket
import ssl
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import requests
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

import certificates
import sites
from media.samples import Serve, drip, in_seconds, local_limits, raw_server
from sglang_epd.errors import (
    DeadlineError,
    MediaError,
    MediaForbiddenError,
    MediaTooLargeError,
    UnavailableError,
)
from sglang_epd.media import (
    FetchedMedia,
    MediaFetcher,
    MediaLimits,
    MediaSource,
    digest,
)
from sglang_epd.media.fetch import _unpacked
from sglang_epd.media.limits import NO_LIMIT
from sglang_epd.media.slots import Account
from waiting import until

BODY = b"picture" * 1000


class FakeResolver(AbstractResolver):
    """Answers from a list of addresses for each name, one list element a look-up."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): lists for name, lists in answers.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        answers = self.answers.get(host)
        if answers is None:
            raise OSError("no such name")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in (answers.pop(0) if len(answers) > 1 else answers[0])
        ]

    async def close(self) -> None:
        pass


async def fetch(
    url: str, limits: MediaLimits | None = None, resolver: AbstractResolver | None = None
) -> FetchedMedia:
    async with MediaFetcher(limits or local_limits(), resolver=resolver) as fetcher:
        return await fetcher.fetch(MediaSource(url=url), in_seconds(5))


async def give_body(request: web.Request) -> web.Response:
    return web.Response(body=BODY)


async def test_a_body_arrives_with_its_digest(serve: Serve) -> None:
    url = await serve(give_body)
    fetched = await fetch(f"{url}/a.png?b=c")
    assert (fetched.data, fetched.digest) == (BODY, digest(BODY))
    assert "picture" not in repr(fetched)


async def test_inline_media_is_hashed_and_bounded() -> None:
    async with MediaFetcher(MediaLimits(max_bytes=1 << 20)) as fetcher:
        for data in (b"small", bytes(1 << 20)):
            source = MediaSource(data=data)
            assert (await fetcher.fetch(source, in_seconds(5))).digest == digest(data)
        with pytest.raises(MediaTooLargeError, match="limit of 1048576"):
            await fetcher.fetch(MediaSource(data=bytes((1 << 20) + 1)), in_seconds(5))
        with pytest.raises(MediaError, match="empty"):
            await fetcher.fetch(MediaSource(data=b""), in_seconds(5))


async def test_want_of_descriptors_is_no_fault_of_the_users(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    url = await serve(handle)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with MediaFetcher(local_limits()) as fetcher:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(UnavailableError, match=r"no connection can be opened .*EMFILE"):
                await fetcher.fetch(MediaSource(url=url), in_seconds(5))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await fetcher.fetch(MediaSource(url=url), in_seconds(5))).data == BODY


async def test_idle_connections_have_a_bound(serve: Serve) -> None:
    """A URL may lead to many hosts, each of which would have one kept."""
    connections = []

    async def handle(request: web.Request) -> web.Response:
        connections.append(request.transport)
        return web.Response(body=BODY)

    async with MediaFetcher(local_limits(), concurrency=4) as fetcher:
        for _ in range(12):
            await fetcher.fetch(MediaSource(url=await serve(handle)), in_seconds(5))
        await until(lambda: sum(not one.is_closing() for one in connections) == 5)
        assert len(connections) == 12


async def test_connections_are_reused(serve: Serve) -> None:
    peers = set()

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=BODY)

    url = await serve(handle)
    async with MediaFetcher(local_limits()) as fetcher:
        for _ in range(3):
            await fetcher.fetch(MediaSource(url=url), in_seconds(5))
    assert len(peers) == 1


async def test_the_request_says_nothing_needless(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        answer = web.Response(body=BODY)
        answer.set_cookie("session", "1")
        return answer

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    url = await serve(handle)
    async with MediaFetcher(local_limits()) as fetcher:
        for _ in range(2):
            await fetcher.fetch(MediaSource(url=url + "/a#part"), in_seconds(5))
    assert seen[1].headers.keys() == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
    assert seen[1].headers["Accept-Encoding"] == "identity"
    assert seen[1].path_qs == "/a"


# Addresses


async def test_loopback_is_closed_by_default(serve: Serve) -> None:
    port = (await serve(give_body)).rpartition(":")[2]
    for host in (
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0.0.0.0",
        "localhost",
        "localhost.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "①②⑦.0.0.1",
        "127。0。0。1",
    ):
        with pytest.raises(MediaError) as caught:
            await fetch(f"http://{host}:{port}/", MediaLimits())
        if not isinstance(caught.value, MediaForbiddenError):  # then nobody tried to connect
            assert caught.value.message.endswith(("cannot be resolved", "malformed")), host


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "169.254.169.254", "[fd00::1]", "[fe80::1]", "224.0.0.1", "100.100.100.200"],
)
async def test_literal_private_addresses_are_closed(host: str) -> None:
    begin = time.monotonic()
    with pytest.raises(MediaForbiddenError, match="not at a public address") as caught:
        await fetch(f"http://{host}/latest/meta-data")
    assert time.monotonic() - begin < 5
    assert caught.value.status == 403


async def test_names_of_private_addresses_are_closed(serve: Serve) -> None:
    resolver = FakeResolver(inner_example=[["127.0.0.1", "10.0.0.1", "::1"]])
    with pytest.raises(MediaForbiddenError, match=r"host inner\.example") as caught:
        await fetch("http://inner.example/", MediaLimits(), resolver)
    assert "127.0.0.1" not in caught.value.message


async def test_a_host_is_asked_at_its_permitted_addresses(serve: Serve) -> None:
    port = (await serve(give_body)).rpartition(":")[2]
    resolver = FakeResolver(mixed_example=[["10.0.0.1", "::1", "127.0.0.1"]])
    assert (await fetch(f"http://mixed.example:{port}", local_limits(), resolver)).data == BODY


async def test_a_name_that_changes_its_address_is_judged_again(serve: Serve) -> None:
    """DNS rebinding: permitted at the first look-up, private at the second."""
    port = (await serve(give_body)).rpartition(":")[2]
    resolver = FakeResolver(rebind_example=[["127.0.0.1"], ["10.0.0.1"]])
    async with MediaFetcher(local_limits(), resolver=resolver) as fetcher:
        source = MediaSource(url=f"http://rebind.example:{port}/")
        assert (await fetcher.fetch(source, in_seconds(5))).data == BODY
        other_port = MediaSource(url="http://rebind.example:1/")
        assert fetcher._session is not None
        connector = fetcher._session.connector
        assert isinstance(connector, aiohttp.TCPConnector)
        connector.clear_dns_cache()
        with pytest.raises(MediaForbiddenError):
            await fetcher.fetch(other_port, in_seconds(5))
    assert resolver.asked == ["rebind.example"] * 2


async def test_the_resolver_in_use_finds_localhost(serve: Serve) -> None:
    port = (await serve(give_body)).rpartition(":")[2]
    assert (await fetch(f"http://localhost:{port}/")).data == BODY


async def test_unknown_and_impossible_names() -> None:
    for host in ("no.such.example", "a" * 80 + ".example", "a..example"):
        with pytest.raises(MediaError, match=r"cannot be resolved|malformed"):
            await fetch(f"http://{host}/", resolver=FakeResolver())
    for host in ("a" * 80 + ".example", "a..example"):
        with pytest.raises(MediaError, match=r"cannot be resolved|malformed"):
            await fetch(f"http://{host}/")
    with pytest.raises(MediaError, match="too long"):
        await fetch("http://" + "a.b" * 100)


async def test_domains_are_allowed_with_their_subdomains(serve: Serve) -> None:
    port = (await serve(give_body)).rpartition(":")[2]
    limits = local_limits(allowed_domains=("Example.com", ".münchen.example"))
    home = [["127.0.0.1"]]

    class Anywhere(FakeResolver):
        async def resolve(self, host: str, port: int = 0, family=socket.AF_INET):
            self.answers[host] = home
            return await super().resolve(host, port, family)

    for host in ("example.com", "EXAMPLE.COM.", "cdn.example.com", "a.münchen.example"):
        assert (await fetch(f"http://{host}:{port}", limits, Anywhere())).data == BODY
    for host in ("evil-example.com", "example.com.evil.org", "example.org", "127.0.0.1", "com"):
        resolver = Anywhere()
        with pytest.raises(MediaForbiddenError, match="not in the allowed domains"):
            await fetch(f"http://{host}:{port}", limits, resolver)
        assert not resolver.asked
    # Not one parser's host for the list and another's for the connection.
    for trick in (f"http://evil.org\\@example.com:{port}", f"http://evil.org#@example.com:{port}"):
        with pytest.raises(MediaError):
            await fetch(trick, limits, FakeResolver())
    assert (await fetch(f"http://evil.org@example.com:{port}", limits, Anywhere())).data == BODY


async def test_hosts_are_allowed_without_their_subdomains(serve: Serve) -> None:
    port = (await serve(give_body)).rpartition(":")[2]
    limits = local_limits(allowed_hosts=("Example.com", "::1"))
    resolver = FakeResolver(example_com=[["127.0.0.1"]], cdn_example_com=[["127.0.0.1"]])
    for host in ("example.com", "EXAMPLE.COM."):
        resolver.answers[host.lower()] = [["127.0.0.1"]]
        assert (await fetch(f"http://{host}:{port}", limits, resolver)).data == BODY
    for host in ("cdn.example.com", "xexample.com", "com", "127.0.0.1"):
        with pytest.raises(MediaForbiddenError, match="not in the allowed domains"):
            await fetch(f"http://{host}:{port}", limits, resolver)
    # Allowed as a host, which opens no address.
    with pytest.raises(MediaForbiddenError, match="not at a public address"):
        await fetch("http://[::1]:9/", limits)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_what_is_behind_urls_has_a_limit_of_its_own(serve: Serve, encoding: str) -> None:
    packed = gzip.compress(BODY) if encoding == "gzip" else BODY

    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": encoding})

    url = await serve(handle)
    tight = local_limits(max_url_bytes=len(BODY) - 1)
    with pytest.raises(MediaTooLargeError, match=f"over the limit of {len(BODY) - 1} bytes"):
        await fetch(url, tight)
    async with MediaFetcher(tight) as fetcher:
        inline = MediaSource(data=BODY)
        assert (await fetcher.fetch(inline, in_seconds(5))).data == BODY
    for limit in (len(BODY), NO_LIMIT):
        limits = local_limits(max_bytes=100, max_url_bytes=limit)
        assert (await fetch(url, limits)).data == BODY


# Redirects


def redirect_to(location: str, status: int = 302) -> Callable:
    async def handle(request: web.Request) -> web.Response:
        if request.path == "/end":
            assert "Authorization" not in request.headers
            return web.Response(body=BODY)
        return web.Response(status=status, headers={"Location": location} if location else {})

    return handle


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_without_credentials(serve: Serve, status: int) -> None:
    url = (await serve(redirect_to("/end", status))).replace("//", "//me:hunter2@")
    fetched = await fetch(url)
    assert fetched.data == BODY
    host = url.rpartition("@")[2]
    url = await serve(redirect_to(f"//me:hunter2@{host}/end"))
    assert (await fetch(url)).data == BODY


async def test_credentials_reach_the_first_host(serve: Serve) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["Authorization"])

    url = (await serve(handle)).replace("//", "//me:hunter2@")
    assert (await fetch(url)).data == b"Basic " + base64.b64encode(b"me:hunter2")


@pytest.mark.parametrize(
    ("location", "kind", "reason"),
    [
        ("http://10.0.0.1/", MediaForbiddenError, "host 10.0.0.1 is not at a public"),
        ("http://[::1]:1/", MediaForbiddenError, "not at a public"),
        ("file:///etc/passwd", MediaForbiddenError, "not 'file'"),
        ("ftp://127.0.0.1/", MediaForbiddenError, "not 'ftp'"),
        ("data:,abc", MediaForbiddenError, "not 'data'"),
        ("mailto:me@h", MediaForbiddenError, "not 'mailto'"),
        ("http://h:99999/", MediaError, "malformed"),
        ("http://[/", MediaError, "malformed"),
        ("", MediaError, "HTTP 302 from 127.0.0.1 without a Location"),
    ],
)
async def test_bad_redirects(serve: Serve, location: str, kind: type, reason: str) -> None:
    with pytest.raises(kind, match=reason):
        await fetch(await serve(redirect_to(location)))


async def test_redirects_leave_no_domain(serve: Serve) -> None:
    url = await serve(redirect_to("http://evil.org/"))
    with pytest.raises(MediaForbiddenError, match=r"evil\.org is not in the allowed"):
        await fetch(url, local_limits(allowed_domains=("127.0.0.1",)))


async def test_redirects_are_counted(serve: Serve) -> None:
    asked = []

    async def handle(request: web.Request) -> web.Response:
        step = int(request.path[1:])
        asked.append(step)
        if step == 0:
            return web.Response(body=BODY)
        return web.Response(status=302, headers={"Location": f"/{step - 1}"})

    url = await serve(handle)
    assert (await fetch(f"{url}/5")).data == BODY
    asked.clear()
    with pytest.raises(MediaError, match="more than 5 redirects"):
        await fetch(f"{url}/100")
    assert len(asked) == 6
    with pytest.raises(MediaError, match="more than 0 redirects"):
        await fetch(f"{url}/1", local_limits(max_redirects=0))


# Bounds


async def drip_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def drip_interim_answers(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("answer", [drip, drip_headers, drip_interim_answers, hang])
async def test_a_slow_answer_ends_at_the_limit(answer: Callable) -> None:
    async with raw_server(answer) as url:
        begin = time.monotonic()
        with pytest.raises(MediaError, match=r"took longer than 0\.3 s") as caught:
            await fetch(f"{url}/a?token=hunter2", local_limits(total_timeout_s=0.3))
        assert time.monotonic() - begin < 5
    assert "hunter2" not in caught.value.message


async def test_slow_redirects_share_the_limit(serve: Serve) -> None:
    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response(status=302, headers={"Location": "/"})

    with pytest.raises(MediaError, match="took longer"):
        await fetch(await serve(handle), local_limits(total_timeout_s=0.3))


async def test_slow_name_servers_share_the_limit() -> None:
    class Slow(FakeResolver):
        async def resolve(self, host: str, port: int = 0, family=socket.AF_INET):
            await asyncio.sleep(60)

    with pytest.raises(MediaError, match="took longer"):
        await fetch("http://h.example", local_limits(total_timeout_s=0.2), Slow())


async def test_the_deadline_comes_first_where_it_is_nearer() -> None:
    async with raw_server(drip) as url, MediaFetcher(local_limits()) as fetcher:
        for seconds in (0.2, -1):
            with pytest.raises(DeadlineError, match="deadline") as caught:
                await fetcher.fetch(MediaSource(url=f"{url}?token=hunter2"), in_seconds(seconds))
            assert "hunter2" not in caught.value.message


async def test_a_full_fetcher_waits_inside_the_deadline(serve: Serve) -> None:
    url = await serve(give_body)
    async with (
        raw_server(hang) as slow,
        MediaFetcher(local_limits(total_timeout_s=1.0), concurrency=1) as fetcher,
    ):
        waiting = asyncio.create_task(fetcher.fetch(MediaSource(url=slow), in_seconds(9)))
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError):
            await fetcher.fetch(MediaSource(url=url), in_seconds(0.1))
        # Inline media needs no slot, and a wait for one is not the media's fault.
        await fetcher.fetch(MediaSource(data=b"inline"), in_seconds(5))
        assert not waiting.done()
        assert (await fetcher.fetch(MediaSource(url=url), in_seconds(5))).data == BODY
        with pytest.raises(MediaError, match="took longer"):
            await waiting


async def test_a_host_is_one_however_it_is_written() -> None:
    async with (
        raw_server(hang) as slow,
        MediaFetcher(local_limits(total_timeout_s=0.3), per_host=2) as fetcher,
    ):
        port = slow.rpartition(":")[2]
        named = [
            f"http://127.0.0.1:{port}",
            f"http://127.0.0.1:0{port}",
            f"http://x@127.0.0.1:{port}",
        ]
        waiting = [
            asyncio.create_task(fetcher.fetch(MediaSource(url=url), in_seconds(5))) for url in named
        ]
        await asyncio.sleep(0.1)
        (share,) = fetcher._slots.hosts.values()
        assert (share.held.total(), len(share.waiting)) == (2, 1)
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("/a%2fb/c.png?acl=%2f*&exp=1%3A2", "/a%2Fb/c.png?acl=%2F*&exp=1%3A2"),
        ("/a b/\N{SNOWMAN}.png?q=\N{SNOWMAN}+%20", "/a%20b/%E2%98%83.png?q=%E2%98%83+%20"),
        ("/100%.png?x=5%", "/100%25.png?x=5%25"),
        ("/a/../%7eb/./c%2D1.png?x=/../%7E", "/~b/c-1.png?x=/../~"),
        ("/../a//b/..", "/a//"),
        ("?x=1#part", "/?x=1"),
        ("/a;b=1/(c)'d'?y=~!$&x[]={}", "/a;b=1/(c)'d'?y=~!$&x%5B%5D=%7B%7D"),
    ],
)
@pytest.mark.parametrize("redirected", [False, True])
async def test_a_url_is_asked_for_as_it_is_written(
    serve: Serve, written: str, sent: str, redirected: bool
) -> None:
    """And as a colocated server asks: some hosts sign the text of it."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        if redirected and len(asked) == 1:
            return web.Response(status=302, headers={"Location": url + written})
        return web.Response(body=BODY)

    url = await serve(handle)
    if redirected and not written.isascii():
        return  # a header has no such characters
    await fetch(url + "/first" if redirected else url + written)
    assert asked[-1] == sent
    assert requests.Request("GET", url + written).prepare().path_url == sent


async def test_an_answer_may_have_long_fields(serve: Serve) -> None:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=BODY, headers={"Content-Security-Policy": "x" * 20_000})

    assert (await fetch(await serve(handle))).data == BODY


async def test_a_slow_host_delays_only_its_own(serve: Serve) -> None:
    url = await serve(give_body)
    async with (
        raw_server(hang) as slow,
        MediaFetcher(local_limits(total_timeout_s=2.0), concurrency=4, per_host=2) as fetcher,
    ):
        waiting = [
            asyncio.create_task(fetcher.fetch(MediaSource(url=f"{slow}/{n}"), in_seconds(20)))
            for n in range(6)
        ]
        await asyncio.sleep(0.05)
        media = await fetcher.fetch(MediaSource(url=url), in_seconds(5))
        assert media.data == BODY
        assert not any(one.done() for one in waiting)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [getattr(result, "reason", None) for result in results] == ["timeout"] * 6
        assert not fetcher._slots.hosts


async def test_a_failure_has_a_reason(serve: Serve) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=int(request.path[1:]))

    url = await serve(refuse)
    for path, reason in (("404", "http_4xx"), ("503", "http_5xx"), ("200", "empty")):
        with pytest.raises(MediaError) as caught:
            await fetch(f"{url}/{path}", local_limits())
        assert caught.value.reason == reason
    with pytest.raises(MediaError) as caught:
        await fetch("http://127.0.0.1:1", local_limits())
    assert caught.value.reason == "connect"


async def test_a_cancelled_fetch_closes_its_connection() -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def endless(writer: asyncio.StreamWriter) -> None:
        begun.set()
        try:
            await drip(writer)
        finally:
            closed.set()

    async with raw_server(endless) as url, MediaFetcher(local_limits()) as fetcher:
        task = asyncio.create_task(fetcher.fetch(MediaSource(url=url), in_seconds(60)))
        await asyncio.wait_for(begun.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), 20)


async def test_an_endless_body_ends_at_the_limit() -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            sent += 65536
            await writer.drain()

    async with raw_server(endless) as url:
        with pytest.raises(MediaTooLargeError, match="limit of 100000 bytes") as caught:
            await fetch(url, local_limits(max_bytes=100_000))
    assert caught.value.status == 413
    assert sent < 32 << 20


async def test_the_announced_length_is_believed_if_it_is_too_much() -> None:
    async with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n") as url:
        with pytest.raises(MediaTooLargeError, match="99999999999 bytes"):
            await fetch(url)


async def test_the_byte_bound_is_exact(serve: Serve) -> None:
    url = await serve(give_body)
    assert (await fetch(url, local_limits(max_bytes=len(BODY)))).data == BODY
    with pytest.raises(MediaTooLargeError):
        await fetch(url, local_limits(max_bytes=len(BODY) - 1))


async def test_endless_redirect_bodies_are_not_read() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    async with raw_server(endless) as url:
        with pytest.raises(MediaForbiddenError):
            await fetch(url)


# Content encodings


def packed(encoding: str, body: bytes) -> Callable:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": encoding})

    return handle


BARE = zlib.compressobj(wbits=-15)
BARE_BODY = BARE.compress(BODY) + BARE.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("identity", BODY),
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZip", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", BARE_BODY),
        ("aws-chunked", BODY),  # a label that object stores leave behind
        ("gzip", gzip.compress(BODY[:100], mtime=0) + gzip.compress(BODY[100:], mtime=0)),
        ("gzip", gzip.compress(BODY, mtime=0) + b"padding"),
    ],
)
async def test_packed_bodies_are_unpacked(serve: Serve, encoding: str, body: bytes) -> None:
    assert (await fetch(await serve(packed(encoding, body)))).data == BODY


@pytest.mark.parametrize(
    ("encoding", "body", "kind", "reason"),
    [
        ("gzip", gzip.compress(bytes(50 << 20), mtime=0), MediaTooLargeError, "unpacked"),
        ("deflate", zlib.compress(bytes(50 << 20)), MediaTooLargeError, "unpacked"),
        ("gzip", gzip.compress(BODY, mtime=0)[:-9], MediaError, "truncated gzip"),
        ("gzip", BODY, MediaError, "damaged gzip"),
        ("deflate", b"\xff", MediaError, "damaged|truncated"),
        ("br", BODY, MediaError, "encoding 'br'"),
        ("zstd", BODY, MediaError, "encoding 'zstd'"),
        (
            "gzip, gzip",
            gzip.compress(gzip.compress(BODY, mtime=0), mtime=0),
            MediaError,
            "'gzip, gzip'",
        ),
    ],
)
async def test_bombs_and_unreadable_encodings(
    serve: Serve, encoding: str, body: bytes, kind: type, reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        await fetch(await serve(packed(encoding, body)), local_limits(max_bytes=1 << 20))


def test_no_more_is_copied_of_a_packed_body_than_is_unpacked() -> None:
    """zlib copies what is left of its input each time that it stops."""
    packing = zlib.compressobj(wbits=31)
    bomb = packing.compress(bytes(16 << 20)) + packing.flush(zlib.Z_FULL_FLUSH)
    body = bomb + os.urandom(8 << 20)
    parts = _unpacked(body, zlib.MAX_WBITS | 32)
    tracemalloc.start()
    try:
        assert sum(map(len, itertools.islice(parts, 15))) == 15 << 20
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_packed_body_of_nothing_is_unpacked_step_by_step() -> None:
    """So that its time can end."""
    parts = [*_unpacked(gzip.compress(b"", mtime=0) * 10_000, zlib.MAX_WBITS | 32)]
    assert 3 <= len(parts) < 10 and not any(parts), "a step is 64 KiB of it"


class Asked(Account):
    """Gives so much memory, and no more.

    Attributes:
        nbytes: that was asked for.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.nbytes, self._room = 0, room

    async def grow(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if nbytes > self._room:
            await asyncio.Event().wait()


async def test_memory_is_asked_for_before_a_body_is_unpacked_into_it(serve: Serve) -> None:
    """A packed one is a thousandth of it."""
    body, mib = bytes(8 << 20), 1 << 20
    source = MediaSource(url=await serve(packed("gzip", gzip.compress(body))))
    async with MediaFetcher(local_limits()) as fetcher:
        account = Asked(16 * mib)
        assert (await fetcher.fetch(source, in_seconds(5), account)).data == body
        assert 8 * mib <= account.nbytes < 10 * mib
        short = Asked(3 * mib)
        waiting = asyncio.create_task(fetcher.fetch(source, in_seconds(5), short))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert short.nbytes < 5 * mib, "nothing is unpacked that there is no room for"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


# Answers that are no media


@pytest.mark.parametrize("status", [400, 401, 404, 416, 429, 500, 503, 304, 300])
async def test_statuses_are_named(serve: Serve, status: int) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=status)

    url = (await serve(handle)).replace("//", "//me:hunter2@")
    with pytest.raises(MediaError, match=rf"^HTTP {status} from 127\.0\.0\.1$") as caught:
        await fetch(f"{url}/secret/path?token=t")
    assert (caught.value.status, caught.value.retry_elsewhere) == (400, False)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", "before the whole body"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "before the whole"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "whole|valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "is empty"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "is empty"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nshort", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "valid HTTP"),
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", "valid HTTP|closed"),
    ],
)
async def test_broken_answers(answer: bytes, reason: str) -> None:
    async with raw_server(answer) as url:
        with pytest.raises(MediaError, match=reason):
            await fetch(f"{url}/?token=hunter2")


async def test_nobody_listens(unused_tcp_port: int) -> None:
    with pytest.raises(MediaError, match=r"^cannot connect to 127\.0\.0\.1$"):
        await fetch(f"http://127.0.0.1:{unused_tcp_port}/")


async def test_a_host_that_does_not_take_connections() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # the backlog is full: further connections get no answer
        filler.setblocking(False)
        filler.connect_ex(address)
    try:
        with pytest.raises(MediaError, match=r"^cannot connect to 127\.0\.0\.1"):
            await fetch(f"http://127.0.0.1:{address[1]}/", local_limits(connect_timeout_s=0.2))
    finally:
        for opened in (*fillers, listener):
            opened.close()


async def test_certificates_are_checked(tmp_path: Path) -> None:
    made = certificates.make(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certfile, made.keyfile)
    app = web.Application()
    app.router.add_get("/", give_body)
    async with sites.up(app, tls=context) as url:
        with pytest.raises(MediaError, match=r"no secure connection to 127\.0\.0\.1"):
            await fetch(f"{url}/")


async def test_sources_that_were_never_parsed() -> None:
    for url in ("ftp://127.0.0.1/a", "http:a", "gopher:", "http://[", "data:,abc"):
        with pytest.raises(MediaError):
            await fetch(url)


def test_concurrency_is_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        MediaFetcher(MediaLimits(), concurrency=0)
