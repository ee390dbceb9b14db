"""What is checked of docker/: files, and the names that SGLang and this package know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from packages import folder_of

DOCKER = Path(__file__).resolve().parents[2] / "docker"
_KINDS = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_sum", "_count"]}


@pytest.fixture(scope="session")
def sglang_metrics() -> set[str]:
    """The names under which SGLang's metrics can be asked for, from its source."""
    source = folder_of("sglang") / "srt" / "observability" / "metrics_collector.py"
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call):
            kind = ast.unparse(node.func).rpartition(".")[2]
            given = {word.arg: word.value for word in node.keywords}
            name = given.get("name")
            if kind in _KINDS and isinstance(name, ast.Constant):
                base = name.value.removesuffix("_total") if kind == "Counter" else name.value
                names |= {base + ending for ending in _KINDS[kind]}
    assert len(names) > 100
    return names


@pytest.fixture(scope="session")
def sglang_flags() -> set[str]:
    """SGLang's own flags, by the fields that they are made of."""
    flags = set()
    for path in (folder_of("sglang") / "srt" / "arg_groups" / "fields").glob("*.py"):
        names = re.findall(r"^    (\w+): A\[", path.read_text(), re.MULTILINE)
        flags |= {f"--{name.replace('_', '-')}" for name in names}
    assert {"--encoder-only", "--port", "--model-path"} <= flags
    return flags


@pytest.fixture(scope="session")
def router_flags() -> set[str]:
    """The flags of SGLang's router."""
    source = folder_of("sglang_router") / "router_args.py"
    names = re.findall(r"\"--(?:\{prefix\})?([a-z][a-z-]*)\"", source.read_text())
    # Of the launcher itself, which chooses the router by it.
    flags = {f"--{name}" for name in names} | {"--mini-lb"}
    assert {"--pd-disaggregation", "--prefill", "--decode", "--host"} <= flags
    return flags


def flags_in(words: list[str]) -> set[str]:
    """The flags of a command line, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}
