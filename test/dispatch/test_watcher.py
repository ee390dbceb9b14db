"""The watcher's thread, its registration endpoint and its places, over real sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

import certificates
from clocks import Clock
from sglang_epd.dispatch import registry as registry_module
from sglang_epd.dispatch.pool import LEASE, STATIC, Health, Pool
from sglang_epd.dispatch.prober import Pace
from sglang_epd.dispatch.registry import Siblings
from sglang_epd.dispatch.watcher import Rhythm, Watcher
from sglang_epd.errors import ConfigError
from sglang_epd.trust import Trust
from waiting import until

PACE = Pace(steady=0.05, doubtful=0.02, least=0.005, timeout=0.2, most=0.1)
RHYTHM = Rhythm(expire=0.02, names=0.05, follow=0.05)
NOBODY = "http://127.0.0.1:9"
PATIENCE_S = 10.0
Call = Callable[..., Any]


@pytest.fixture
def clock() -> Clock:
    """The pool's."""
    return Clock(1000.0)


@pytest.fixture
def pool(clock) -> Pool:
    return Pool("ours", clock)


@pytest.fixture
async def watch(pool) -> AsyncIterator[Callable[..., Watcher]]:
    watchers: list[Watcher] = []

    def start(*urls: str, port: int = 0, trust: Trust | None = None, **changes: Any) -> Watcher:
        into = changes.pop("into", pool)
        changes = {"pace": PACE, "rhythm": RHYTHM, **changes}
        watcher = Watcher(into, urls, "127.0.0.1", port, trust or Trust(), **changes)
        watchers.append(watcher)
        watcher.start()
        return watcher

    yield start
    for watcher in watchers:
        await asyncio.to_thread(watcher.close)
    assert not any(thread.name == "encoder watcher" for thread in threading.enumerate())


@pytest.fixture
async def call() -> AsyncIterator[Call]:
    """Asks a watcher; answers the status and what it said."""
    async with aiohttp.ClientSession() as session:

        async def call(watcher: Watcher, method: str, path: str, **options: Any) -> Any:
            token = options.pop("token", None)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            url = f"http://127.0.0.1:{watcher.port}{path}"
            async with session.request(method, url, headers=headers, **options) as response:
                body = await response.read()
                return response.status, json.loads(body) if body[:1] == b"{" else body

        yield call


async def register(call: Call, watcher: Watcher, url: str, token=None, **more: Any) -> Any:
    message = {"url": url, **more}
    return await call(watcher, "POST", "/register_encoder_url", json=message, token=token)


async def unregister(call: Call, watcher: Watcher, url: str, token=None) -> Any:
    path = "/unregister_encoder_url"
    return await call(watcher, "DELETE", path, json={"url": url}, token=token)


# Registrations


async def test_an_encoder_registers_is_probed_and_leaves(watch, call, pool, status_server):
    server = await status_server()
    watcher = watch()
    status, said = await register(call, watcher, server.url + "/", namespace="ours", lease_s=15)
    assert (status, said) == (200, {"lease_s": 15.0})
    await until(lambda: pool.state(server.url) is Health.READY)
    status, listed = await call(watcher, "GET", "/list_encoder_urls")
    assert status == 200
    assert listed["encoder_urls"] == [server.url]
    (encoder,) = listed["encoders"]
    assert (encoder["state"], encoder["owners"]) == ("ready", [LEASE])
    assert (await unregister(call, watcher, server.url))[0] == 200
    assert pool.urls() == []
    assert (await unregister(call, watcher, server.url))[0] == 200, "twice is no error"


@pytest.mark.parametrize("token", [None, "wrong", "secre", "secret2"])
async def test_without_the_token_nobody_registers_leaves_or_looks(watch, call, pool, token):
    pool.register(NOBODY, "ours", 15.0)
    watcher = watch(trust=Trust("secret"))
    before = pool.urls()
    assert (await register(call, watcher, "http://10.6.6.6:1", token))[0] == 401
    assert (await unregister(call, watcher, NOBODY, token))[0] == 401
    assert (await call(watcher, "GET", "/list_encoder_urls", token=token))[0] == 401
    assert (await call(watcher, "GET", "/health", token=token))[0] == 200
    assert pool.urls() == before
    assert (await register(call, watcher, "http://127.0.0.1:7", "secret"))[0] == 200
    assert (await call(watcher, "GET", "/list_encoder_urls", token="secret"))[0] == 200
    assert pool.urls() == [*before, "http://127.0.0.1:7"]


async def test_one_of_another_identity_is_turned_away_with_both_names(watch, call, pool):
    watcher = watch()
    status, said = await register(call, watcher, NOBODY, namespace="theirs", lease_s=15)
    assert status == 409
    assert "ours" in said["error"]
    assert "theirs" in said["error"]
    assert pool.urls() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"url": 7}',
        b'{"url": ""}',
        b'{"url": "http://user:pw@encoder:1"}',
        b'{"url": "http://encoder:1/../x"}',
        b'{"url": "ftp://encoder:1"}',
        b'{"url": "http://0.0.0.0:30000"}',
        b'{"url": "http://e:1", "lease_s": "long"}',
        b'{"url": "http://e:1", "lease_s": 1.9}',
        b'{"url": "http://e:1", "lease_s": 301}',
        b'{"url": "http://e:1", "lease_s": -15}',
        b'{"url": "http://e:1", "lease_s": 1e999}',
        b'{"url": "http://e:1", "lease_s": NaN}',
        b'{"url": "http://e:1", "namespace": 7}',
        b'{"url": "http://e:1", "namespace": "' + b"x" * 300 + b'"}',
        b'{"url": "http://e:1", "namespace": "a\\nb"}',
    ],
    ids=lambda body: repr(body[:50]),
)
async def test_what_cannot_be_understood_is_400_and_changes_nothing(watch, call, pool, body):
    watcher = watch()
    for method, path in (
        ("POST", "/register_encoder_url"),
        *([("DELETE", "/unregister_encoder_url")] if b'"http://e:1"' not in body else []),
    ):
        status, said = await call(watcher, method, path, data=body)
        assert (status, set(said)) == (400, {"error"})
    assert pool.urls() == []


async def test_a_long_message_is_not_read(watch, call, pool):
    watcher = watch()
    body = b'{"url": "http://e:1", "x": "' + b"x" * (65 << 10) + b'"}'
    status, _ = await call(watcher, "POST", "/register_encoder_url", data=body)
    assert status == 413
    assert pool.urls() == []


async def test_a_message_that_does_not_end_is_given_up(watch, monkeypatch):
    monkeypatch.setattr(registry_module, "_BODY_TIMEOUT_S", 0.05)
    watcher = watch()
    reader, writer = await asyncio.open_connection("127.0.0.1", watcher.port)
    writer.write(b"POST /register_encoder_url HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    async with asyncio.timeout(5):
        assert b" 400 " in await reader.readline()
    writer.close()


async def test_there_is_an_end_to_how_many_register(watch, call, pool, monkeypatch):
    monkeypatch.setattr(registry_module, "_MAX_ENCODERS", 2)
    watcher = watch("http://127.0.0.1:7")
    for port in (1, 2):
        assert (await register(call, watcher, f"http://127.0.0.1:{port}", lease_s=15))[0] == 200
    assert (await register(call, watcher, "http://127.0.0.1:3", lease_s=15))[0] == 503
    assert (await register(call, watcher, "http://127.0.0.1:2", lease_s=15))[0] == 200, "renewed"
    assert len(pool.urls(LEASE)) == 2


async def test_a_lease_ends_if_it_is_not_renewed(watch, call, pool, clock):
    watcher = watch()
    await register(call, watcher, NOBODY, namespace="ours", lease_s=15)
    clock.now += 14
    await register(call, watcher, NOBODY, namespace="ours", lease_s=15)
    clock.now += 14
    await asyncio.sleep(3 * RHYTHM.expire)
    assert pool.urls() == [NOBODY]
    clock.now += 2
    await until(lambda: not pool.urls())


async def test_a_registration_of_sglangs_own_holds_until_it_is_withdrawn(watch, call, pool, clock):
    watcher = watch()
    assert await register(call, watcher, NOBODY) == (200, {"lease_s": None})
    clock.now += 1e6
    await asyncio.sleep(3 * RHYTHM.expire)
    assert pool.urls() == [NOBODY]
    assert (await call(watcher, "GET", "/list_encoder_urls"))[1]["encoders"][0]["lease_s"] is None
    await unregister(call, watcher, NOBODY)
    assert not pool.urls()


async def test_nobody_registers_a_static_encoder_away(watch, call, pool):
    watcher = watch(NOBODY)
    await register(call, watcher, NOBODY, lease_s=15)
    await unregister(call, watcher, NOBODY)
    assert pool.urls(STATIC) == [NOBODY]


# The thread


async def test_static_encoders_are_probed_and_doubts_heeded(watch, pool, status_server):
    server = await status_server()
    watch(server.url, pace=Pace(steady=60.0))
    await until(lambda: pool.state(server.url) is Health.READY)
    asked = server.asked
    pool.look(server.url)
    await until(lambda: server.asked > asked)


async def test_names_are_looked_up_again_and_again(watch, pool):
    addresses = ["127.0.0.1", "127.0.0.2"]

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("encoders", 9)
        return addresses

    watch("http://encoders:9", resolve=resolve)
    assert sorted(pool.urls()) == ["http://127.0.0.1:9", "http://127.0.0.2:9"]
    addresses.append("127.0.0.3")
    await until(lambda: len(pool.urls()) == 3)
    del addresses[0]
    await until(lambda: sorted(pool.urls()) == ["http://127.0.0.2:9", "http://127.0.0.3:9"])


async def test_a_look_up_that_breaks_is_tried_again(watch, pool, caplog):
    results: list[Any] = [["127.0.0.1"], RuntimeError("broken"), ["127.0.0.1", "127.0.0.2"]]

    async def resolve(host: str, port: int) -> list[str]:
        result = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(result, Exception):
            raise result
        return result

    watch("http://encoders:9", resolve=resolve)
    await until(lambda: len(pool.urls()) == 2)
    assert "broken" in caplog.text


async def test_a_closed_watcher_leaves_the_port_and_heeds_nothing(watch, pool, call):
    watcher = watch(NOBODY)
    await asyncio.to_thread(watcher.close)
    pool.look(NOBODY)
    pool.add("http://127.0.0.1:7")
    with pytest.raises(aiohttp.ClientConnectorError):
        await call(watcher, "GET", "/health")
    watch(port=watcher.port, into=Pool("ours"))


# What cannot be


async def test_a_port_of_another_server_is_refused_by_name(watch, pool):
    other = watch()
    with pytest.raises(ConfigError, match=f"--encoder-bootstrap-port {other.port} .*in use"):
        watch(port=other.port)
    with pytest.raises(ConfigError, match="by another server"):
        watch(port=other.port, secret=b"mine")
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(ConfigError, match="in use"),
    ):
        watch(port=mute.getsockname()[1], secret=b"mine")


async def test_a_host_and_urls_that_are_none_are_refused(pool, watch):
    nowhere = Watcher(pool, [], "203.0.113.1", 0, Trust())
    with pytest.raises(ConfigError, match=r"--encoder-bootstrap-port 0 at 203\.0\.113\.1"):
        nowhere.start()
    with pytest.raises(ConfigError, match="--encoder-urls"):
        watch("http://[::1")


# Several tokenizer processes


async def test_a_sibling_knows_who_registers_at_the_other(watch, call, pool):
    trust = Trust("secret")
    mine = Pool("ours")
    holder = watch(trust=trust, secret=b"shared")
    follower = watch(trust=trust, secret=b"shared", port=holder.port, into=mine)
    await register(call, holder, NOBODY, "secret", lease_s=15)
    await register(call, holder, "http://127.0.0.1:7", "secret")
    await until(lambda: len(mine.urls(LEASE)) == 2)
    await unregister(call, holder, NOBODY, "secret")
    await until(lambda: mine.urls(LEASE) == ["http://127.0.0.1:7"])
    # The holder ends: the other takes its place, and still knows who had registered.
    await asyncio.to_thread(holder.close)
    await until(lambda: follower._runner is not None)
    assert mine.urls() == ["http://127.0.0.1:7"]
    assert (await register(call, follower, NOBODY, "secret", lease_s=15))[0] == 200


async def test_a_stranger_is_no_sibling(watch, call, pool):
    watcher = watch(trust=Trust("secret"), secret=b"shared")
    path = f"http://127.0.0.1:{watcher.port}/list_encoder_urls"
    forged = [
        Siblings(b"other").shows("00"),
        "Sibling 00",
        "Sibling ",
        "Sibling 00 ü",
        Siblings(b"shared").shows("00")[:-1],
    ]
    async with aiohttp.ClientSession() as session:
        for shown in forged:
            async with session.get(path, headers={"Authorization": shown}) as response:
                assert response.status == 401
        shown = Siblings(b"shared").shows("00")
        async with session.get(path, headers={"Authorization": shown}) as response:
            assert (await response.json())["proof"] == Siblings(b"shared").proof("00")


# TLS


async def test_with_a_certificate_registration_is_https(watch, pool, tmp_path):
    made = certificates.make(tmp_path)
    trust = Trust("secret", made.certfile, made.keyfile, ca_certs=made.certfile)
    watcher = watch(trust=trust)
    async with aiohttp.ClientSession() as session:
        async with session.post(
            f"https://localhost:{watcher.port}/register_encoder_url",
            json={"url": NOBODY, "lease_s": 15},
            headers=trust.headers(),
            ssl=trust.client_ssl(),
        ) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://localhost:{watcher.port}/health")
    assert pool.urls() == [NOBODY]


async def test_a_renewed_certificate_is_shown_to_new_connections(watch, tmp_path, caplog):
    made = certificates.make(tmp_path)
    trust = Trust("secret", made.certfile, made.keyfile)
    watcher = watch(trust=trust, rhythm=replace(RHYTHM, certificate=0.02))

    async def answers(believed: str) -> bool:
        context = Trust(ca_certs=believed).client_ssl()
        async with aiohttp.ClientSession() as session:
            url = f"https://localhost:{watcher.port}/health"
            try:
                async with session.get(url, ssl=context):
                    return True
            except aiohttp.ClientSSLError:
                return False

    first = str(tmp_path / "first.pem")
    shutil.copy(made.certfile, first)
    assert await answers(first)
    # Its key is not there yet.
    other = certificates.make(tmp_path / "other")
    caplog.clear()
    shutil.copy(other.certfile, made.certfile)
    async with asyncio.timeout(PATIENCE_S):
        while "Watching encoders, certificate" not in caplog.text:
            await asyncio.sleep(0.02)
    assert await answers(first)
    shutil.copy(other.keyfile, made.keyfile)
    async with asyncio.timeout(PATIENCE_S):
        while not await answers(made.certfile):
            await asyncio.sleep(0.02)
    assert not await answers(first)


async def test_a_certificate_that_cannot_be_read_is_refused_at_start(watch, tmp_path):
    (tmp_path / "x.pem").write_text("x")
    path = str(tmp_path / "x.pem")
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        watch(trust=Trust("", path, path))


async def test_its_event_loop_says_how_late_it_is(watch):
    lags: list[float] = []
    watcher = watch(observe_lag=lags.append)
    assert watcher._loop is not None
    watcher._loop.call_soon_threadsafe(time.sleep, 0.5)
    await until(lambda: max(lags, default=0.0) > 0.3)
