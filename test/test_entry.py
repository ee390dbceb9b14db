"""What SGLang calls, and how it ends a server that the plug-in cannot serve."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from sglang_epd import entry, plugin
from sglang_epd.errors import ConfigError


@pytest.fixture
def registered(monkeypatch):
    """What the plug-in is told, without hooking anything."""
    told: list[bool] = []
    monkeypatch.delenv("SGLANG_EPD", raising=False)
    monkeypatch.setattr(plugin, "register", lambda *, role: told.append(role))
    return told


@pytest.mark.parametrize("value", ["off", "OFF", " 0 ", "false", "no", None, "", "on", "1"])
def test_it_is_on_unless_it_is_switched_off(monkeypatch, registered, value):
    if value is not None:
        monkeypatch.setenv("SGLANG_EPD", value)
    entry.register()
    assert registered == ([False] if value in (None, "", "on", "1") else [])


def test_sglang_finds_it():
    (found,) = entry_points(group="sglang.srt.plugins", name="sglang_epd")
    assert found.load() is entry.register


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("--encoder-only", True),
        ("--model-path M --language-only --port 1", True),
        ("serve M --language-onl", True),  # argparse takes what is no other flag's
        ("--language-model-only --encoder-urls http://e --disaggregation-mode decode", False),
        ("--model-path --config", False),
        ("", False),
    ],
)
def test_a_role_is_read_from_the_command_line(line, role):
    assert entry.names_role(line.split()) is role


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("model-path: M\nlanguage-only: true\n", True),
        ('"encoder_only" : True', True),
        ("encoder_only: 'yes'", True),
        ("language-only: false\n# encoder-only: true\n", False),
        ("language-model-only: true", False),
    ],
)
def test_a_role_is_read_from_the_file_that_a_flag_names(tmp_path, text, role):
    (tmp_path / "server.yaml").write_text(text)
    assert entry.names_role(["--config", str(tmp_path / "server.yaml")]) is role
    assert entry.names_role(["--config", str(tmp_path / "missing.yaml")]) is False


@pytest.mark.parametrize(
    "error", [ConfigError("0.5.24"), ModuleNotFoundError("No module named 'blake3'")]
)
def test_a_failure_ends_a_server_with_a_role_and_no_other(monkeypatch, registered, error):
    def fail(*, role: bool) -> None:
        raise error

    monkeypatch.setattr(plugin, "register", fail)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--encoder-only"])
    with pytest.raises(SystemExit, match="^sglang-epd ends this server, .*: " + str(error)):
        entry.register()
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    with pytest.raises(type(error)):  # which SGLang logs, and goes on
        entry.register()
