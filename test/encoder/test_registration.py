"""The encoder's announcements, to real registries of language servers."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial

import pytest
from aiohttp import web

import certificates
from sglang_epd.dispatch.pool import LEASE, Pool
from sglang_epd.dispatch.registry import Registry
from sglang_epd.encoder import registration as module
from sglang_epd.encoder.registration import Registration
from sglang_epd.media import resolver
from sglang_epd.trust import Trust
from sglang_epd.wire.http import open_session
from waiting import until

URL = "http://127.0.0.1:30000"
BEAT = {"lease_s": 2.0, "retry_s": 0.05}


class Directory:
    """A language server's registry; may be restarted with nothing in its memory."""

    def __init__(self, port: int, namespace: str, trust: Trust) -> None:
        self.port = port
        self.namespace = namespace
        self.trust = trust
        self.pool = Pool(namespace)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{self.trust.scheme}://localhost:{self.port}"

    async def start(self) -> None:
        self.pool = Pool(self.namespace)
        self._runner = web.AppRunner(Registry(self.pool, self.trust).app(), shutdown_timeout=0.1)
        await self._runner.setup()
        tls = self.trust.server_ssl()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None


@pytest.fixture
async def directory(unused_tcp_port_factory):
    made: list[Directory] = []

    async def make(
        namespace: str = "ours", trust: Trust | None = None, *, start: bool = True
    ) -> Directory:
        made.append(Directory(unused_tcp_port_factory(), namespace, trust or Trust()))
        if start:
            await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.stop()


@pytest.fixture
async def register():
    made: list[Registration] = []

    def start(*urls: str, trust: Trust | None = None, **beat: float) -> Registration:
        trust, beat = trust or Trust(), {**BEAT, **beat}
        shown = {"headers": trust.headers(), "tls": trust.client_ssl()}
        registration = Registration(URL, urls, namespace="ours", **shown, **beat)
        made.append(registration)
        registration.start()
        return registration

    yield start
    for one in made:
        await one.leave()


async def test_it_joins_everywhere_and_leaves(directory, register):
    one, other = await directory(), await directory()
    registration = register(one.url, other.url + "/", one.url)
    await until(lambda: one.pool.urls(LEASE) == other.pool.urls(LEASE) == [URL])
    await registration.leave()
    assert one.pool.urls() == other.pool.urls() == []
    await registration.leave()  # again: nothing


async def test_a_language_server_that_restarts_knows_it_within_a_heartbeat(directory, register):
    one = await directory()
    register(one.url)
    await until(lambda: one.pool.urls() == [URL])
    await one.stop()
    await one.start()
    assert one.pool.urls() == []
    await until(lambda: one.pool.urls() == [URL])


async def test_one_that_comes_later_is_found_soon_and_logged_once(directory, register, caplog):
    caplog.set_level("INFO", logger="sglang_epd.encoder.registration")
    one = await directory(start=False)
    register(one.url, lease_s=15.0, retry_s=0.02)
    await until(lambda: "cannot connect to it" in caplog.text)
    await asyncio.sleep(0.2)  # it tries again and again
    await one.start()
    # The directory knows it before its answer is here and logged.
    await until(lambda: ": registered" in caplog.text, seconds=5.0)
    assert one.pool.urls() == [URL]
    assert caplog.text.count("cannot connect to it") == 1
    assert caplog.text.count(": registered") == 1


async def test_name_servers_may_fail(directory, register, caplog, monkeypatch):
    """Leases are kept up by the last addresses; a name without any is told by its fault."""
    one = await directory()
    place = ("127.0.0.1", int(one.url.rpartition(":")[2]))
    answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", place)]]
    failures = []

    def look_up(*_: object) -> list:
        if answers:
            return answers.pop()
        failures.append(1)
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(resolver, "_look_up", look_up)
    # aiohttp keeps addresses for ten seconds.
    monkeypatch.setattr(module, "open_session", partial(open_session, use_dns_cache=False))
    register(f"http://language.example:{place[1]}")
    await until(lambda: one.pool.urls() == [URL])
    await one.stop()
    await one.start()
    await until(lambda: one.pool.urls() == [URL])
    assert failures
    assert "look up its name" not in caplog.text
    register("http://unknown.example:1")
    await until(lambda: "cannot look up its name" in caplog.text)


@pytest.mark.parametrize(
    ("namespace", "token", "said"),
    [("ours", "secret", "HTTP 401"), ("theirs", "", "HTTP 409")],
)
async def test_a_refusal_is_said_loudly_and_not_the_end(
    directory, register, caplog, namespace, token, said
):
    one = await directory(namespace, Trust(token))
    register(one.url)
    await until(lambda: said in caplog.text)
    assert not one.pool.urls()
    ours = [one for one in caplog.records if one.name == "sglang_epd.encoder.registration"]
    assert [record.levelname for record in ours] == ["ERROR"]
    if namespace == "theirs":
        assert "ours" in caplog.text
        assert "theirs" in caplog.text
    # The other side is mended: nobody has to restart the encoder.
    await one.stop()
    one.namespace, one.trust = "ours", Trust()
    await one.start()
    await until(lambda: one.pool.urls() == [URL])


async def test_over_tls_only_where_the_certificate_is_believed(
    directory, register, caplog, tmp_path
):
    made = certificates.make(tmp_path)
    one = await directory(trust=Trust("secret", made.certfile, made.keyfile))
    stranger = register(one.url, trust=Trust("secret"))
    await until(lambda: "no TLS connection" in caplog.text)
    assert not one.pool.urls()
    assert "secret" not in caplog.text
    await stranger.leave()
    register(one.url, trust=Trust("secret", ca_certs=made.certfile))
    await until(lambda: one.pool.urls() == [URL])


async def test_leaving_takes_two_seconds_at_most(register):
    async def never(reader, writer) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    registration = register(f"http://127.0.0.1:{port}", "http://127.0.0.1:9")
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await registration.leave()
    assert time.monotonic() - started < 10
    server.close()
    await server.wait_closed()
