from __future__ import annotations

import itertools
import time

import aiohttp
import pytest

import certificates
from sglang_epd.dispatch.pool import Health, Pool
from sglang_epd.dispatch.prober import Pace, Prober
from sglang_epd.trust import Trust
from waiting import until

PACE = Pace(steady=0.05, doubtful=0.02, least=0.005, timeout=0.1, doubtful_timeout=0.07, most=0.1)


@pytest.fixture
def seen() -> list[Health]:
    """The states that encoders have been in."""
    return []


@pytest.fixture
def pool(seen) -> Pool:
    return Pool("ours", on_move=lambda _url, _old, new, _why: seen.append(new))


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def prober(pool, session):
    prober = Prober(pool, session, Trust().client_ssl(), PACE)
    pool.listen(prober.doubt)
    yield prober
    await prober.close()


def described(pool: Pool) -> dict:
    (one,) = pool.describe()
    return one


async def test_an_encoder_that_answers_is_ready_and_asked_again(prober, pool, status_server):
    server = await status_server()
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.READY)
    assert pool.snapshot().encoders[0].load == 7
    await until(lambda: server.asked > 3)
    assert "Authorization" not in server.headers[0]


async def test_an_encoder_of_another_model_is_asked_as_seldom_as_a_sound_one(
    prober, pool, status_server
):
    server = await status_server()
    server.report["namespace"] = "another"
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.MISFIT)
    assert prober._pause_s(Health.MISFIT, 0.0) > PACE.doubtful


async def test_one_that_drains_says_so_and_may_come_back(prober, pool, status_server):
    server = await status_server()
    server.report["state"] = "draining"
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.DRAINING)
    server.report["state"] = "ready"
    await until(lambda: pool.state(server.url) is Health.READY)


async def test_one_without_a_tower_that_works_is_given_up_until_it_has_one(
    prober, pool, status_server, seen
):
    server = await status_server()
    server.report["towers"] = [{"alive": False, "patches": 0}, {"alive": True, "patches": 7}]
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.READY)
    server.report["towers"][1]["alive"] = False
    await until(lambda: pool.state(server.url) is Health.OPEN)
    # A pause of this machine may have made it a suspect before.
    assert (seen[:2], seen[-2:]) == (
        [Health.JOINING, Health.READY],
        [Health.SUSPECT, Health.OPEN],
    )
    assert described(pool)["why"] == "none of its towers works"
    server.report["towers"][0]["alive"] = True
    await until(lambda: pool.state(server.url) is Health.READY)


async def test_a_frozen_one_is_suspected_given_up_and_taken_back(prober, pool, status_server, seen):
    server = await status_server()
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.READY)
    server.freeze()
    await until(lambda: pool.state(server.url) is Health.OPEN)
    # A pause of this machine may have made it a suspect before.
    assert (seen[:2], seen[-2:]) == (
        [Health.JOINING, Health.READY],
        [Health.SUSPECT, Health.OPEN],
    )
    assert described(pool)["why"] == "no answer within 0.07 s"
    server.thaw()
    await until(lambda: pool.state(server.url) is Health.READY)


async def test_one_that_is_out_of_reach_is_asked_on(prober, pool, dead_url, monkeypatch):
    failures: list[float] = []
    failed = pool.failed
    monkeypatch.setattr(
        pool, "failed", lambda url, why: (failures.append(time.monotonic()), failed(url, why))
    )
    pool.add(dead_url)
    await until(lambda: len(failures) >= 8)
    assert pool.state(dead_url) is Health.OPEN
    assert "out of reach" in described(pool)["why"]
    pauses = [after - before for before, after in itertools.pairwise(failures)]
    assert min(pauses[-2:]) > 0.9 * PACE.most, "less and less often"
    assert min(pauses[:3]) < PACE.most


async def test_a_doubt_is_looked_into_at_once(pool, session, status_server):
    server = await status_server()
    prober = Prober(pool, session, Trust().client_ssl(), Pace(steady=60.0, timeout=0.2))
    pool.add(server.url)
    pool.listen(prober.doubt)
    await until(lambda: pool.state(server.url) is Health.READY)
    asked = server.asked
    pool.look(server.url)
    await until(lambda: server.asked > asked)
    for _ in range(1000):
        prober.doubt(server.url)
    assert server.asked <= asked + 2, "many doubts are one question"
    await prober.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"It works!",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"namespace": "ours"}',
        b'{"namespace": 7, "state": "ready"}',
        b'{"namespace": "ours", "state": "fine"}',
        b'{"namespace": "ours", "state": "ready", "patches_queued": -1}',
        b'{"namespace": "ours", "state": "ready", "towers": [false]}',
        b'{"namespace": "ours", "state": "ready", "patches_queued": "many"}',
        b'{"namespace": "ours", "state": "ready", "patches_per_s": NaN}',
        b'{"namespace": "ours", "state": "ready", "patches_per_s": 1e999}',
        b'{"namespace": "\xff", "state": "ready"}',
        b'{"namespace": "' + b"x" * 300 + b'", "state": "ready"}',
        b" " * 1_000_000,
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_an_answer_that_is_none_of_ours_is_a_failure_that_says_so(
    prober, pool, status_server, raw
):
    server = await status_server()
    server.raw = raw
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.OPEN)
    assert "status" in described(pool)["why"]


async def test_sglangs_own_encoder_is_told_from_ours(prober, pool, status_server):
    server = await status_server()
    server.status = 404
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.OPEN)
    assert described(pool)["why"] == ("answers HTTP 404 to /v1/status: is it a sglang-epd encoder?")


async def test_probes_that_fail_unforeseen_go_on_and_not_without_a_pause(
    pool, session, status_server, monkeypatch
):
    server, heard = await status_server(), pool.heard

    def broken(url, report):
        if server.asked < 4:
            raise RuntimeError("no space left")
        heard(url, report)

    monkeypatch.setattr(pool, "heard", broken)
    prober = Prober(pool, session, Trust().client_ssl(), PACE)
    pool.listen(prober.doubt)
    began = time.monotonic()
    pool.add(server.url)
    await until(lambda: pool.state(server.url) is Health.READY)
    assert time.monotonic() - began > 3 * PACE.most
    await prober.close()


async def test_one_that_has_gone_is_not_asked_any_more_and_may_join_anew(
    prober, pool, status_server
):
    server = await status_server()
    pool.add(server.url)
    await until(lambda: server.asked > 0)
    pool.remove(server.url, "static")
    await until(lambda: not prober._tasks)
    asked = server.asked
    pool.add(server.url)
    await until(lambda: server.asked > asked)


async def test_a_certificate_has_to_be_believed(pool, session, status_server, tmp_path):
    made = certificates.make(tmp_path)
    server = await status_server(tls=Trust("", made.certfile, made.keyfile).server_ssl())
    stranger = Prober(pool, session, Trust().client_ssl(), PACE)
    pool.add(server.url)
    stranger.doubt(server.url)
    await until(lambda: pool.state(server.url) is Health.OPEN)
    assert "TLS" in described(pool)["why"]
    await stranger.close()
    friend = Prober(pool, session, Trust(ca_certs=made.certfile).client_ssl(), PACE)
    friend.doubt(server.url)
    await until(lambda: pool.state(server.url) is Health.READY)
    await friend.close()
