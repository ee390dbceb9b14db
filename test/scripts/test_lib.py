"""Which Python the scripts take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "scripts" / "lib.sh"
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def find(tmp_path: Path):
    """Runs `find_python` of scripts in a clone that has no environment yet.

    A python3.11 and a python3.12 that fail, as pyenv's do, are first in PATH.
    """
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "lib.sh").write_text(LIB.read_text())
    (tmp_path / "bin").mkdir()
    for version in ("3.11", "3.12"):
        shim = tmp_path / "bin" / f"python{version}"
        shim.write_text("#!/bin/sh\necho command not found >&2\nexit 127\n")
        shim.chmod(0o755)
    home = tmp_path / "pyenv" / "versions" / f"{THIS}.99" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", f'. {scripts}/lib.sh; echo "$VENV:$(find_python):$*"', "x", *arguments],
            env={
                "HOME": str(tmp_path),
                "PATH": f"{tmp_path / 'bin'}:/usr/sbin:{tmp_path / 'none'}:{os.defpath}",
                "PYENV_ROOT": str(tmp_path / "pyenv"),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


def test_what_fails_is_passed_over_and_pyenvs_is_found(find, tmp_path: Path) -> None:
    venv, python, rest = find("--python", THIS, "--fast").stdout.strip().split(":")
    assert venv == f"{tmp_path}/.venv-{THIS}" and rest == "--fast"
    assert Path(python).resolve() == Path(sys._base_executable).resolve()


def test_one_that_is_asked_for_and_will_not_do_is_an_error(find) -> None:
    done = find(PYTHON="python3.12")
    assert "PYTHON=python3.12 will not do" in done.stderr
    assert "takes one of 3.11 3.12" in find("--python", "3.13").stderr


def test_the_python_of_the_environment_is_kept(find, tmp_path: Path) -> None:
    home = tmp_path / ".venv" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys._base_executable)
    (home.parent / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    venv, python, rest = find("-x").stdout.strip().split(":")
    assert (venv, rest) == (f"{tmp_path}/.venv", "-x")
    # The base interpreter, which outlives the environment.
    assert Path(python).resolve() == Path(sys._base_executable).resolve()
    assert tmp_path not in Path(python).parents
