"""`sglang-epd bench` hands on to the comparison of the source tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sglang_epd
from sglang_epd.cli import bench
from sglang_epd.cli.main import app
from sglang_epd.errors import ConfigError


@pytest.mark.parametrize("typed", [["--help"], ["--dry-run", "--arms", "colocated"], []])
def test_what_is_typed_is_handed_on(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def replace(_path: str, arguments: list[str]) -> None:
        called.append(arguments)

    monkeypatch.setattr(os, "execv", replace)
    assert CliRunner().invoke(app, ["bench", *typed]).exit_code == 0
    program = Path(sglang_epd.__file__).parents[2] / "benchmark" / "compare.py"
    assert called == [[sys.executable, str(program), *typed]]


def test_a_package_without_its_source_tree_says_so(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "site-packages" / "sglang_epd" / "__init__.py"
    with pytest.raises(ConfigError, match="clone its source tree"):
        bench.entry(package)
