"""The command's own manners; each subcommand has a file of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_epd.cli import main
from sglang_epd.errors import ConfigError


def test_it_shows_its_version():
    shown = CliRunner().invoke(main.app, ["--version"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("sglang-epd 0.")


def test_an_unknown_flag_is_named():
    refused = CliRunner().invoke(main.app, ["--no-such-flag"])
    assert refused.exit_code == 2
    assert "--no-such-flag" in refused.stderr


def test_what_a_user_can_mend_is_one_line(monkeypatch, capsys):
    def refuse() -> None:
        raise ConfigError("--encoders has to be positive")

    monkeypatch.setattr(main, "app", refuse)
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 1
    assert capsys.readouterr().err == "sglang-epd: --encoders has to be positive\n"


def test_help_imports_neither_sglang_nor_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from sglang_epd.cli.main import app;"
        "CliRunner().invoke(app, ['--help']);"
        "sys.exit(' '.join(m for m in sys.modules if m in ('torch', 'sglang', 'zmq')) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
