"""A checkpoint is called by the code that makes it: no edit leaves an old one in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
_NAME = "print(make_checkpoint._digest({name!r}))"
_EDIT = "pathlib.Path({file!r}).open('a').write('# edited\\n')"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    copy = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(scripts: Path, *lines: str) -> list[str]:
    """What a process prints that has imported `make_checkpoint`."""
    program = "\n".join(("import pathlib, make_checkpoint", *lines))
    environment = {
        **os.environ,
        "PYTHONPATH": str(scripts),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SGLANG_EPD_CACHE": str(scripts.parent / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("name", "file", "made_by_it"),
    [
        # It takes a function of a module that no class of it is from.
        ("tiny-gemma3", "qwen.py", True),
        ("tiny-intern-s2-preview", "families/qwen3_5_moe.py", True),
        ("tiny-muse-spark", "unweighted.py", True),
        ("tiny-muse-spark", "families/muse_spark.py", True),
        ("tiny-qwen2-vl", "build.py", True),
        ("tiny-qwen2-vl", "chat_template.jinja", True),
        ("tiny-qwen2-vl", "families/muse_spark.py", False),
        ("tiny-qwen2-vl", "check.py", False),
    ],
)
def test_a_checkpoint_has_another_name_if_what_makes_it_was_edited(
    scripts: Path, name: str, file: str, made_by_it: bool
) -> None:
    before = run(scripts, _NAME.format(name=name))
    with (scripts / "checkpoints" / file).open("a") as edited:
        edited.write("\n# edited\n" if file.endswith(".py") else "edited")
    assert (run(scripts, _NAME.format(name=name)) != before) is made_by_it


def test_what_was_imported_before_an_edit_makes_nothing_under_the_name_of_what_is_there_now(
    scripts: Path,
) -> None:
    name = "tiny-muse-spark"
    file = str(scripts / "checkpoints" / "families" / "muse_spark.py")
    before, after, refusal = run(
        scripts,
        _NAME.format(name=name),
        _EDIT.format(file=file),
        _NAME.format(name=name),
        "try: make_checkpoint.ensure('tiny-muse-spark')",
        "except RuntimeError as error: print(str(error).replace(' ', '_'))",
    )
    assert before == after
    assert "muse_spark.py" in refusal
    assert run(scripts, _NAME.format(name=name)) != [before]
    assert not (scripts.parent / "cache").exists()
