"""Which servers must have every hook, and when that is seen; and tokenizer workers."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from sglang_epd.errors import ConfigError
from sglang_epd.seams import contract, hooks, roles, server_args

ENCODER = {"encoder_only": True, "language_only": False, "disaggregation_mode": "null"}
LANGUAGE = {**ENCODER, "encoder_only": False, "language_only": True}
PREFILL = {**LANGUAGE, "disaggregation_mode": "prefill"}
OTHER = {**ENCODER, "encoder_only": False}
DECODE = {**OTHER, "disaggregation_mode": "decode"}


@pytest.fixture
def misfit(monkeypatch):
    """The installed SGLang is another."""
    monkeypatch.setattr(hooks, "_state", hooks._State())
    monkeypatch.setattr(contract, "version", lambda _name: "0.5.24")


def publish(**flags) -> None:
    roles.hold("context", SimpleNamespace(**flags), role="scheduler")


@pytest.mark.parametrize("flags", [ENCODER, LANGUAGE, PREFILL], ids=str)
def test_a_server_with_a_role_ends(misfit, flags):
    with pytest.raises(ConfigError, match=r"0\.5\.24: the versions differ"):
        publish(**flags)
    with pytest.raises(ConfigError, match=r"0\.5\.24: the versions differ"):
        server_args.resolve(None, SimpleNamespace(**flags))


@pytest.mark.parametrize("flags", [OTHER, DECODE, {}], ids=str)
def test_a_server_without_one_goes_on(misfit, caplog, flags):
    publish(**flags)
    resolved = []
    server_args.resolve(resolved.append, given := SimpleNamespace(**flags))
    assert resolved == [given]
    told = ["Prompts are laid out as SGLang does it" in one.message for one in caplog.records]
    assert told == [True] * (flags is DECODE)


def test_where_all_holds_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(hooks, "_state", hooks._State())
    for flags in (ENCODER, LANGUAGE, DECODE, OTHER):
        publish(**flags)
    assert not caplog.records


VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
NAME = "sglang_epd.seams.roles:app"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)


def test_workers_begin_here():
    roles.announce_workers()
    roles.announce_workers()
    assert os.environ[VARIABLE] == NAME


def test_another_application_is_not_silently_replaced(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine:app")
    with pytest.raises(ConfigError, match="mine:app"):
        roles.announce_workers()
    assert os.environ[VARIABLE] == "mine:app"


def test_it_has_nothing_else():
    with pytest.raises(AttributeError):
        _ = roles.application


@pytest.mark.servers  # imports what such a worker does
def test_the_application_is_sglangs_with_the_plugins_loaded_before():
    """As the HTTP server asks for it, in a process that has loaded nothing yet."""
    code = (
        "import sys\n"
        "from uvicorn.importer import import_from_string\n"
        f"app = import_from_string({NAME!r})\n"
        "from sglang.srt import plugins\n"
        "from sglang.srt.entrypoints import http_server\n"
        "from sglang.srt.disaggregation.encoder import receiver\n"
        "assert app is http_server.app and plugins._plugins_loaded\n"
        "assert receiver.EncoderBootstrapServer.__name__ == 'BootstrapPlace'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("shown", [True, False])
def test_metrics_that_nobody_reads_may_be_there_twice(flags, shown):
    """As of two engines of a process."""
    flags(observability={"enable_metrics": shown})
    assert (roles.registry() is REGISTRY) is shown
    assert (roles.registry() is roles.registry()) is shown
