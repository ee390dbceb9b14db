"""Every command in the pages could be typed: parsed by the parsers that would take it."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.shell import PAGES, ROOT, VALUE, Block, blocks, commands
from sglang_epd.cli.main import app

SCRIPTS = [block for page in PAGES for block in blocks(page) if block.language == "sh"]
# Whose flags are their own; that they are called in the pages is known here.
OTHERS = {"apt-get", "cat", "curl", "export", "grep", "kill", "openssl", "source"}
# Click's, which typer brings along without a name for it.
UsageError: Any = typer.BadParameter.__base__
PYTHON = {"python", ".venv/bin/python"}


def name_of(block: Block) -> str:
    return f"{block.page.stem}:{block.text.splitlines()[0][:40]}"


@pytest.fixture(scope="module")
def check(launcher: argparse.ArgumentParser) -> Callable[[list[str]], None]:
    """Fails where a command cannot be typed so."""

    def run(words: list[str]) -> None:
        head, *rest = words
        if head in PYTHON:
            run_python(rest)
        elif head == "sglang-epd":
            run_ours(rest)
        elif head in ("pip", "docker", "kubectl"):
            {"pip": pip, "docker": docker, "kubectl": kubectl}[head](rest)
        elif head.startswith("scripts/"):
            script(head, rest)
        elif head.startswith(".venv/bin/"):
            # Installed by scripts/install, into the environment of this Python.
            assert (Path(sys.prefix) / "bin" / Path(head).name).exists(), head
        else:
            assert head in OTHERS, head

    def run_python(rest: list[str]) -> None:
        if rest[0] == "-m":
            module(rest[1], rest[2:])
        elif rest[0] != "-c" and rest[0] != "ask.py":  # of the quick start
            script(rest[0], rest[1:])

    def module(name: str, rest: list[str]) -> None:
        if name == "sglang.launch_server":
            given = launcher.parse_args(rest)
            assert not (given.encoder_only and given.language_only)
            assert given.model_path
        elif name == "sglang_router.launch_router":
            args = importlib.import_module(name).parse_router_args(rest)
            assert args.prefill_urls or args.worker_urls or args.service_discovery
        else:
            assert name == "json.tool", name

    return run


def run_ours(rest: list[str]) -> None:
    """As the command would, but for doing it."""
    group: Any = typer.main.get_command(app)
    with group.make_context("sglang-epd", list(rest)) as context:
        left = context.args if rest and rest[0].startswith("-") else rest
        name, command, left = group.resolve_command(context, list(left))
        command.make_context(name, left, parent=context)


def script(path: str, rest: list[str]) -> None:
    file = ROOT / path
    assert file.is_file(), path
    assert os.access(file, os.X_OK) or path.endswith(".py"), path
    # A shell script hands its flags on to the one of its name.
    texts = [one.read_text() for one in (file, file.with_suffix(".py")) if one.is_file()]
    for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
        assert any(flag in text for text in texts), (path, flag)


def pip(rest: list[str]) -> None:
    if rest == ["list", "--format=freeze"]:
        return
    assert rest[0] == "install"
    if "--constraint" in rest:
        place = rest.index("--constraint")
        rest = rest[:place] + rest[place + 2 :]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in rest[1:]:
        if word == "--dry-run":
            continue
        asked = re.fullmatch(r"(?:\.|sglang-epd)(?:\[([\w,-]+)\])?", word)
        assert asked, word
        for extra in filter(None, (asked[1] or "").split(",")):
            assert extra in extras["optional-dependencies"], extra


def docker(rest: list[str]) -> None:
    assert rest[0] in ("build", "compose")
    assert (ROOT / rest[rest.index("-f") + 1]).is_file()


def kubectl(rest: list[str]) -> None:
    if rest[0] == "apply":
        assert (ROOT / rest[rest.index("-k") + 1] / "kustomization.yaml").is_file()


def test_there_are_scripts() -> None:
    pages = {block.page.name for block in SCRIPTS}
    assert {"README.md", "quickstart.md", "gpu.md", "migration.md", "planner.md"} <= pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    known = {"sh", "python", "text", "yaml", "json"}
    assert {block.language for block in blocks(page)} <= known


@pytest.mark.parametrize("block", SCRIPTS, ids=name_of)
def test_a_script_is_one(block: Block, check: Callable[[list[str]], None]) -> None:
    told = subprocess.run(
        ["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=10, check=False
    )
    assert told.returncode == 0, told.stderr
    for words in commands(block.text):
        check(words)


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model-path m --encoder-olny",
        "python -m sglang.launch_server --encoder-transfer-backend rdma --model-path m",
        "python -m sglang.launch_server --model-path m --encoder-only --language-only",
        "python -m sglang_router.launch_router --mini-lp --prefill http://p 1 --decode http://d",
        "sglang-epd up --model m --encoder 2",
        "sglang-epd upp --model m",
        "sglang-epd plan --rate much",
        "scripts/demo --dp",
        "scripts/no-such",
        'pip install ".[mooncacke]"',
        "pip install --constraint kept.txt --dry-rum .",
        "docker compose -f compose.yaml up",
        "kubectl apply -k docker/kubernetes",
        "no-such-command",
        "curl http://x | no-such-command",
        "kill $(no-such-command)",
    ],
)
def test_what_cannot_be_typed_is_seen(text: str, check: Callable[[list[str]], None]) -> None:
    with pytest.raises((AssertionError, SystemExit, argparse.ArgumentError, UsageError)):
        for words in commands(text):
            check(words)


def test_commands_are_taken_apart_as_a_shell_does() -> None:
    text = """# nothing
A=1 B="$(one -x)" two "a b" \\
    --c=d    # said of it
three | four && five $(six 'seven eight') nine; export T=$(cat f)
"""
    assert [*commands(text)] == [
        ["one", "-x"],
        ["two", "a b", "--c=d"],
        ["three"],
        ["four"],
        ["six", "seven eight"],
        ["five", VALUE, "nine"],
        ["cat", "f"],
        ["export", f"T={VALUE}"],
    ]


def test_python_in_the_pages_compiles() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert found
    for block in found:
        compile(block.text, block.page.name, "exec")


def test_every_script_is_on_a_page() -> None:
    told = "".join(page.read_text() for page in [*PAGES, ROOT / "benchmark" / "README.md"])
    # Sourced or run by the others.
    parts = {"lib.sh", "demo.py", "family_table.py"}
    scripts = [path for path in (ROOT / "scripts").iterdir() if os.access(path, os.X_OK)]
    runs = [path for path in (ROOT / "benchmark").glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) > 5 and len(runs) > 5
    for path in [*scripts, *runs]:
        if path.is_file() and path.name not in parts:
            assert f"{path.parent.name}/{path.name}" in told, path.name
