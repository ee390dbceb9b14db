from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_epd.dispatch.pool import LEASE, STATIC, Pool
from sglang_epd.encoder.server import advertised_url
from sglang_epd.errors import ConfigError
from sglang_epd.seams import bootstrap, rundir
from sglang_epd.seams.bootstrap import BootstrapPlace

TYPED = ["http://127.0.0.1:9/"]


@pytest.fixture
def serving(flags, monkeypatch):
    """Sets SGLang's flags of serving."""
    for name in ("SGLANG_EPD_TOKEN", "SGLANG_HOST_IP", "HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(BootstrapPlace, "latest", None)

    def set_flags(**given):
        flags(serving={"host": "127.0.0.1", "port": 30000, **given})

    set_flags()
    return set_flags


def test_where_it_is_made_nobody_can_register_yet():
    urls = list(TYPED)
    place = BootstrapPlace(host="127.0.0.1", port=1, urls=urls)
    assert place.list_urls() == TYPED
    assert place.watcher is None
    place.close()


def test_it_begins_when_the_pool_is_there(serving):
    place = BootstrapPlace(host="127.0.0.1", port=0, urls=TYPED)
    pool = Pool("ours")
    watcher = bootstrap.start(pool)
    try:
        assert watcher.port
        assert pool.urls(STATIC) == ["http://127.0.0.1:9"]
        pool.register("http://127.0.0.1:7", "ours", 15.0)
        assert place.list_urls() == ["http://127.0.0.1:9", "http://127.0.0.1:7"]
    finally:
        place.close()


def test_what_ends_with_a_server_ends_once(serving):
    place, ended = BootstrapPlace(host="127.0.0.1", port=0), []
    bootstrap.ends_with_its_server(lambda: ended.append("receiver"))
    manager = SimpleNamespace(encoder_bootstrap_server=place)
    for _ in range(2):  # SGLang shuts down again when the process ends
        bootstrap.end(None, SimpleNamespace(tokenizer_manager=manager))
    assert ended == ["receiver"]


@pytest.mark.parametrize("language_only", [True, False])
def test_an_engine_that_ends_frees_the_port(serving, language_only):
    place = BootstrapPlace(host="127.0.0.1", port=0, urls=TYPED)
    port = bootstrap.start(Pool("ours")).port
    server = place if language_only else None
    bootstrap.end(None, SimpleNamespace(tokenizer_manager=None))  # it did not start
    bootstrap.end(
        None, SimpleNamespace(tokenizer_manager=SimpleNamespace(encoder_bootstrap_server=server))
    )
    second = BootstrapPlace(host="127.0.0.1", port=port)
    try:
        if language_only:
            assert bootstrap.start(Pool("ours")).port == port
        else:
            with pytest.raises(ConfigError, match="in use"):
                bootstrap.start(Pool("ours"))
    finally:
        place.close()
        second.close()


def test_the_workers_of_one_server_share_the_port(serving, monkeypatch):
    monkeypatch.setenv("SGLANG_EPD_RUN_ID", "x")
    monkeypatch.setenv("SGLANG_EPD_RUN_SECRET", "ab" * 32)
    serving(tokenizer_worker_num=2)
    one, other = Pool("ours"), Pool("ours")
    first = BootstrapPlace(host="127.0.0.1", port=0)
    one.register("http://127.0.0.1:7", "ours", 15.0)
    port = bootstrap.start(one).port
    second = BootstrapPlace(host="127.0.0.1", port=port)
    try:
        bootstrap.start(other)
        assert other.urls(LEASE) == ["http://127.0.0.1:7"]
        serving()
        BootstrapPlace(host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match="in use"):
            bootstrap.start(Pool("ours"))
    finally:
        second.close()
        first.close()
    assert rundir.secret() == bytes.fromhex("ab" * 32)


@pytest.mark.parametrize(
    ("token", "key", "shown"), [(None, "key", "key"), ("token", "key", "token"), (None, None, "")]
)
def test_the_token_or_else_the_api_key_is_shown(serving, monkeypatch, token, key, shown):
    serving(api_key=key)
    if token:
        monkeypatch.setenv("SGLANG_EPD_TOKEN", token)
    assert bootstrap.trust().token == shown


@pytest.mark.parametrize(
    ("host", "typed", "scheme", "expected"),
    [
        ("10.0.0.7", "", "http", "http://10.0.0.7:30000"),
        ("10.0.0.7", "", "https", "https://10.0.0.7:30000"),
        ("0.0.0.0", "", "http", "http://192.0.2.1:30000"),
        ("::", "", "http", "http://192.0.2.1:30000"),
        ("::1", "", "http", "http://[::1]:30000"),
        ("0.0.0.0", "https://Encoder-0:443/", "http", "https://encoder-0:443"),
    ],
)
def test_an_encoder_says_how_it_is_reached(serving, monkeypatch, host, typed, scheme, expected):
    serving(host=host)
    monkeypatch.setenv("SGLANG_HOST_IP", "192.0.2.1")
    assert advertised_url(typed, scheme) == expected


def test_an_advertised_url_has_to_be_one(serving):
    with pytest.raises(ConfigError, match="SGLANG_EPD_ENCODER_ADVERTISE_URL"):
        advertised_url("encoder:30000", "http")
