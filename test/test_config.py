from __future__ import annotations

import re
from pathlib import Path

import pytest

import reference
import sglang_epd
from packages import folder_of
from sglang_epd import config
from sglang_epd.config import UNREAD, Settings, announce
from sglang_epd.dispatch.policies import policy
from sglang_epd.errors import ConfigError

PACKAGE = Path(sglang_epd.__file__).parent


def test_without_variables_the_defaults_hold():
    settings = Settings.from_env({"PATH": "/bin", "SGLANG_OTHER": "1", "SGLANG_EPD": "off"})
    assert settings == Settings()
    assert settings.request_timeout_s > 0
    policy(settings.dispatch_policy)


def test_variables_are_read_by_their_types():
    env = {
        "TOKEN": "secret",
        "MEDIA_MAX_PIXELS": "7",
        "URL_CACHE_ENTRIES": "0",
        "STORE_TIMEOUT_MS": "9",
    }
    env |= {
        "TELL_SOURCES": "off",
        "FINGERPRINT": "full",
        "EMBEDDING_CACHE_MB": "2",
    }
    assert Settings.from_env({f"SGLANG_EPD_{name}": raw for name, raw in env.items()}) == Settings(
        token="secret",
        media_max_pixels=7,
        url_cache_entries=0,
        store_timeout_ms=9.0,
        tell_sources=False,
        fingerprint="full",
        embedding_cache_mb=2,
    )


def test_kubernetes_words_for_services_are_no_settings():
    """Of a service `sglang-epd-router`, and of one `sglang-epd`."""
    links = {
        f"SGLANG_EPD{name}{word}": "tcp://10.0.0.1:80"
        for name in ("", "_ROUTER")
        for word in ("_SERVICE_HOST", "_SERVICE_PORT", "_SERVICE_PORT_HTTP", "_PORT")
    }
    links["SGLANG_EPD_ROUTER_PORT_80_TCP_ADDR"] = "10.0.0.1"
    assert Settings.from_env(links | {"SGLANG_EPD_TOKEN": "secret"}) == Settings(token="secret")
    with pytest.raises(ConfigError, match="SGLANG_EPD_STORE_PORT"):
        Settings.from_env(links | {"SGLANG_EPD_STORE_PORT": "80"})


@pytest.mark.parametrize(
    ("env", "request_s", "encoder_s"),
    [
        ({}, 120.0, 60.0),
        ({"SGLANG_ENCODER_RECV_TIMEOUT": "600"}, 600.0, 300.0),
        ({"SGLANG_ENCODER_RECV_TIMEOUT": "30"}, 30.0, 60.0),
        ({"SGLANG_ENCODER_RECV_TIMEOUT": "600", "SGLANG_EPD_REQUEST_TIMEOUT_S": "5"}, 5.0, 60.0),
        ({"SGLANG_ENCODER_RECV_TIMEOUT": "600", "SGLANG_EPD_ENCODER_TIMEOUT_S": "9"}, 600.0, 9.0),
        ({"SGLANG_EPD_REQUEST_TIMEOUT_S": "400"}, 400.0, 200.0),
        ({"SGLANG_ENCODER_RECV_TIMEOUT": ""}, 120.0, 60.0),
    ],
)
def test_sglangs_deadline_counts_where_ours_is_not_set(env, request_s, encoder_s):
    settings = Settings.from_env(env)
    assert (settings.request_timeout_s, settings.encoder_timeout_s) == (request_s, encoder_s)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1", True), ("true", True), (" ON ", True), ("0", False), ("False", False), ("off", False)],
)
def test_a_switch_is_on_or_off(raw, value):
    assert Settings.from_env({"SGLANG_EPD_SHARED_MEMORY": raw}).shared_memory is value


# By its type: values of a variable that are none.
WRONG = {
    "SGLANG_EPD_TOKENS": ["x"],
    "SGLANG_EPD_": ["x"],
    "SGLANG_EPD_REQUEST_TIMEOUT_S": ["soon", "", "0", "-1", "nan", "inf"],
    "SGLANG_ENCODER_RECV_TIMEOUT": ["0", "long"],
    "SGLANG_EPD_RECEIVE_BUDGET_MB": ["1.5", "0", "-1", "2G"],
    "SGLANG_EPD_URL_CACHE_ENTRIES": ["-1", "few"],
    "SGLANG_EPD_SHARED_MEMORY": ["", "2", "maybe"],
    "SGLANG_EPD_ENCODER_PUSH_NETWORKS": ["10.0.0.1/8", "somewhere"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"{name}\b"):
        Settings.from_env({name: value})


def test_every_variable_that_the_package_reads_is_known():
    """A variable that one module reads must not be refused by another."""
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"SGLANG_EPD_(?:[A-Z]+_)*[A-Z]+\b(?!_)", source))
    assert {"SGLANG_EPD_TOKEN", "SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET"} <= names
    valid = {
        "SGLANG_EPD_DISPATCH_POLICY": "shuffle",
        "SGLANG_EPD_ENCODER_PUSH_NETWORKS": "10.0.0.0/8",
        "SGLANG_EPD_FINGERPRINT": "full",
        "SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "::1/128",
    }
    for name in sorted(names):
        Settings.from_env({name: valid.get(name, "1")})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RECEIVE_BUDGET_MB", "0", "whole number, at least 1"),
        ("GRANT_TIMEOUT_S", "inf", "a number of seconds, more than 0, less than 1e+12"),
        ("SHARED_MEMORY", "always", "on, off"),
        ("FINGERPRINT", "some", "samples, full"),
        ("MEDIA_MAX_MB", "many", "a number of MiB, more than 0, less than 1e+12"),
    ],
)
def test_a_refusal_says_what_was_given_and_what_is_expected(name, value, expected):
    with pytest.raises(ConfigError) as refused:
        Settings.from_env({f"SGLANG_EPD_{name}": value})
    assert str(refused.value) == f"SGLANG_EPD_{name}={value!r}: expected {expected}"


def test_a_token_is_not_shown():
    assert "secret" not in repr(Settings(token="secret", store="file:///secret"))


def test_what_is_declared_is_what_is_read():
    for one in reference.declared():
        assert one.text
        assert one.servers
        if one.default:
            assert Settings.from_env({one.variable: one.default}) == Settings()


# Read, one way or another: by SGLang's code, by this package, or refused at start-up.
READ = {
    "SGLANG_ENCODER_DISPATCH_MIN_ITEMS",
    "SGLANG_ENCODER_IMAGE_PROCESSOR_USE_GPU",
    "SGLANG_ENCODER_MM_LOAD_WORKERS",
    "SGLANG_ENCODER_MM_RECEIVER_MODE",
    "SGLANG_ENCODER_PREPROC_WORKERS",
    "SGLANG_ENCODER_RECV_TIMEOUT",
    "SGLANG_VLM_CACHE_SIZE_MB",
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for table in UNREAD.values():
        for name in table:
            monkeypatch.delenv(name, raising=False)


def test_what_is_set_is_named_in_one_line_with_what_takes_its_place(caplog, monkeypatch):
    monkeypatch.setenv("SGLANG_ENCODER_MAX_BATCH_SIZE", "16")
    monkeypatch.setenv("SGLANG_ENCODER_SEND_TIMEOUT", "")
    monkeypatch.setenv("SGLANG_ENCODER_HTTP_TIMEOUT", "99")  # a language server's
    announce("encoder", {"--pp-size": True})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message == (
        "Set, but not read by sglang-epd: SGLANG_ENCODER_MAX_BATCH_SIZE (instead: "
        "SGLANG_EPD_ENCODER_BATCH_ITEMS and SGLANG_EPD_ENCODER_BATCH_PATCHES); "
        "SGLANG_ENCODER_SEND_TIMEOUT (instead: SGLANG_EPD_GRANT_TIMEOUT_S on language servers); "
        "--pp-size (instead: nothing: a tower has one stage)"
    )


@pytest.mark.parametrize("server", UNREAD)
def test_where_nothing_is_set_nothing_is_said(caplog, server):
    announce(server, {"--pp-size": False, "--trust-mm-content-hashes": False})
    assert not caplog.records


def test_every_variable_of_sglangs_epd_is_read_or_named():
    """Of its encoder's and receiver's source, and the section of its declarations."""
    srt = folder_of("sglang") / "srt"
    declared = (srt / "environ.py").read_text()
    section = declared.partition("# Encoder pipeline and disaggregation")[2].partition("# =====")
    rest = section[2].partition("    # =====")[0]
    names = set(re.findall(r"^    (SGLANG_\w+) = ", rest, re.M))
    for path in (srt / "disaggregation/encoder").glob("*.py"):
        names |= set(re.findall(r"\bSGLANG_(?:ENCODER|EMBEDDING|VLM)_\w+", path.read_text()))
    named = {name for table in UNREAD.values() for name in table if name.startswith("SGLANG_")}
    assert len(names) > 15
    assert names == named | READ
    assert not named & READ


def test_the_settings_that_take_their_place_exist():
    known = config.variables().keys()
    told = " ".join(text for table in UNREAD.values() for text in table.values())
    named = set(re.findall(r"SGLANG_EPD_\w+", told))
    assert named
    assert named <= known


def test_the_page_on_migration_has_them_all():
    page = (Path(__file__).parents[1] / "docs/migration.md").read_text()
    missing = {name for table in UNREAD.values() for name in table if f"`{name}`" not in page}
    assert not missing
    assert not {name for name in READ if f"`{name}`" not in page}
