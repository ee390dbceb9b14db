from __future__ import annotations

import asyncio

import pytest

from sglang_epd.dispatch import names as names_module
from sglang_epd.dispatch.names import Names
from sglang_epd.dispatch.pool import STATIC, Pool

URL = "http://encoders:30000"


class Resolver:
    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.error: OSError | None = None
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if self.error is not None:
            raise self.error
        return self.addresses


@pytest.fixture
def pool() -> Pool:
    return Pool("ours")


def known(pool: Pool) -> set[str]:
    return set(pool.urls())


def at(*addresses: str) -> set[str]:
    return {f"http://{address}:30000" for address in addresses}


async def test_a_name_with_several_addresses_is_as_many_encoders(pool):
    resolver = Resolver("10.0.0.1", "10.0.0.2", "10.0.0.1")
    await Names(pool, [URL + "/"], resolver).refresh()
    assert known(pool) == at("10.0.0.1", "10.0.0.2")
    assert pool.urls(f"dns:{URL}") == pool.urls()
    assert resolver.asked == [("encoders", 30000)]


async def test_a_name_of_grpc_encoders_is_looked_up_as_well(pool):
    names = Names(pool, ["grpc://encoders:30000/"], Resolver("10.0.0.1", "fd00::1", "10.0.0.2"))
    await names.refresh()
    assert known(pool) == {"grpc://10.0.0.1:30000", "grpc://10.0.0.2:30000"}


async def test_encoders_come_and_go_with_their_addresses(pool):
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    names = Names(pool, [URL], resolver)
    await names.refresh()
    resolver.addresses = ["10.0.0.3", "10.0.0.2"]
    await names.refresh()
    assert known(pool) == at("10.0.0.2", "10.0.0.3")
    resolver.addresses = ["10.0.0.3"]
    await names.refresh()
    assert known(pool) == at("10.0.0.3"), "who is left keeps what it is called"


async def test_a_name_with_one_address_or_none_stays_as_typed_until_it_has_more(pool):
    resolver = Resolver()
    names = Names(pool, [URL], resolver)
    for resolver.addresses in ([], ["10.0.0.1"], ["10.0.0.9"]):
        await names.refresh()
        assert known(pool) == {URL}
    resolver.addresses = ["10.0.0.9", "10.0.0.1"]
    await names.refresh()
    assert known(pool) == at("10.0.0.1", "10.0.0.9")


async def test_who_is_known_before_somebody_leaves():
    """What one has in work can be taken to the other."""
    moves: list[str] = []
    pool = Pool("ours", on_move=lambda url, *_: moves.append(url))
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    names = Names(pool, [URL], resolver)
    await names.refresh()
    moves.clear()
    resolver.addresses = ["10.0.0.3", "10.0.0.4"]
    await names.refresh()
    assert moves[:2] == sorted(at("10.0.0.3", "10.0.0.4"))
    assert set(moves[2:]) == at("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize("error", [OSError("no such name"), None])
async def test_a_resolver_that_fails_changes_nothing(pool, error):
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    names = Names(pool, [URL], resolver)
    await names.refresh()
    resolver.error, resolver.addresses = error, []
    await names.refresh()
    assert known(pool) == at("10.0.0.1", "10.0.0.2")


async def test_a_resolver_that_never_answers_is_not_waited_for(pool, monkeypatch):
    monkeypatch.setattr(names_module, "_TIMEOUT_S", 0.05)

    async def never(_host: str, _port: int) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    await asyncio.wait_for(Names(pool, [URL], never).refresh(), 2.0)
    assert known(pool) == {URL}


async def test_addresses_and_certificates_are_for_what_was_typed(pool):
    typed = ["http://10.0.0.1:1", "http://[::1]:1", "https://encoders:1"]
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    await Names(pool, typed, resolver).refresh()
    assert pool.urls(STATIC) == typed
    assert not resolver.asked


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["::1", "127.0.0.1"], {URL}),
        (["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"], at("10.0.0.1", "10.0.0.2")),
        (["fd00::1", "fd00::2"], at("[fd00::1]", "[fd00::2]")),
    ],
)
async def test_a_host_with_addresses_of_both_families_is_one_encoder(pool, addresses, expected):
    await Names(pool, [URL], Resolver(*addresses)).refresh()
    assert known(pool) == expected


async def test_two_names_of_one_encoder_both_vouch_for_it(pool):
    one, other = Resolver("10.0.0.1", "10.0.0.2"), Resolver("10.0.0.2", "10.0.0.3")
    first = Names(pool, [URL], one)
    second = Names(pool, ["http://others:30000"], other)
    await first.refresh()
    await second.refresh()
    other.addresses = ["10.0.0.3"]
    await second.refresh()
    assert known(pool) == at("10.0.0.1", "10.0.0.2", "10.0.0.3")
