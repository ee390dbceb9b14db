"""The command's own manners; each subcommand has a file of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sglang_epd.cli import main
from sglang_epd.errors import ConfigError


@pytest.mark.parametrize(
    ("flag", "code", "told"), [("--version", 0, "sglang-epd 0."), ("--no-such", 2, "--no-such")]
)
def test_its_own_flags(flag, code, told):
    shown = CliRunner().invoke(main.app, [flag])
    assert shown.exit_code == code
    assert told in shown.output


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
