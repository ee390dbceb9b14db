"""Which servers must have every hook, and when that is seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
    monkeypatch.delenv("SGLANG_EPD_CONTENT_IDENTITY", raising=False)


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


def test_a_server_that_is_to_name_media_by_content_ends(misfit, monkeypatch):
    monkeypatch.setenv("SGLANG_EPD_CONTENT_IDENTITY", "1")
    with pytest.raises(ConfigError, match="the versions differ"):
        publish(**OTHER)


def test_where_all_holds_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(hooks, "_state", hooks._State())
    for flags in (ENCODER, LANGUAGE, DECODE, OTHER):
        publish(**flags)
    assert not caplog.records
