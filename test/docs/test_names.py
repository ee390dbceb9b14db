"""Every flag, setting, variable, metric and message that pages name exists, and every one that
exists is on a page."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import reference
import sglang_epd
from docs.shell import PAGES, ROOT
from packages import folder_of
from sglang_epd.cli.main import app

PACKAGE = Path(sglang_epd.__file__).parent
SOURCES = [path.read_text() for path in sorted(PACKAGE.rglob("*.py"))]
# Of other programs than SGLang, its router and ours.
OTHER_FLAGS = {"--build", "--constraint", "--cpunodebind", "--from-literal", "--membind"}
# Of other programs; those that this package leaves to them.
OTHER_VARIABLES = {
    *("HF_HOME", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "OMP_NUM_THREADS", "GRAFANA_PASSWORD"),
    *("HTTP_PROXY", "HTTPS_PROXY", "CUDA_VISIBLE_DEVICES"),
    *("SGLANG_HOST_IP", "HOST_IP"),  # of `utils.network.get_local_ip_auto`
    *("API_ADDRESS", "ENCODER_0_GPU", "ENCODER_1_GPU", "PREFILL_GPU", "DECODE_GPU"),
    *(
        "MC_FORCE_TCP",
        "MC_MIN_RPC_PORT",
        "MC_MAX_RPC_PORT",
        "IPC_LOCK",
        "SYS_NICE",
        "VIDEO_MAX_PIXELS",
    ),
    *("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "SGLANG_LOGGING_CONFIG_PATH", "SGLANG_EPD_CACHE"),
}
# Between processes of one server; nobody is to set them.
INTERNAL = {"SGLANG_EPD_RUN_ID", "SGLANG_EPD_RUN_SECRET", "SGLANG_EPD_CACHE"}
page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def flags(launcher: argparse.ArgumentParser) -> set[str]:
    """Every flag that there is: of SGLang, its router, our command, and our scripts."""
    known = set(launcher._option_string_actions) | OTHER_FLAGS
    router = folder_of("sglang_router") / "router_args.py"
    known |= {f"--{n}" for n in re.findall(r"\"--(?:\{prefix\})?([a-z-]+)\"", router.read_text())}
    group: Any = typer.main.get_command(app)
    for command in group.commands.values():
        known |= {name for option in command.params for name in option.opts}
    for folder in ("scripts", "benchmark"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py"):
                known |= set(re.findall(r"--[a-z][a-z-]+", path.read_text()))
    return known | {"--install-completion", "--version", "--help"}


@page
def test_flags_exist(page: Path, flags: set[str]) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # anchors have dashes, too
    named = set(re.findall(r"(?<![\w|-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w*-])", text))
    assert named <= flags, named - flags


@page
def test_variables_exist(page: Path) -> None:
    settings = set(re.findall(r"^\| `(\w+)`", reference.settings_page(), re.MULTILINE))
    theirs = (folder_of("sglang") / "srt" / "environ.py").read_text() + "".join(SOURCES)
    named = set(re.findall(r"(?<!\w)[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+(?![\w*])", page.read_text()))
    for name in named - settings - OTHER_VARIABLES:
        assert re.search(rf"\b{name}\b", theirs), name


@page
def test_defaults_are_those_of_the_settings(page: Path) -> None:
    """Where a number stands in brackets behind a setting's name."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)`", reference.settings_page(), re.MULTILINE)
    defaults = dict(rows)
    for name, value in re.findall(r"`(SGLANG_\w+)` \((\w+)\)", page.read_text()):
        assert defaults[name] == value, name


@page
def test_metrics_exist(page: Path) -> None:
    metrics = [metric for found in reference.metrics().values() for metric in found]
    ours = {name for metric in metrics for name in reference.samples_of(metric)}
    ours |= {metric.describe()[0].name for metric in metrics}  # without endings
    for name in re.findall(r"sglang:epd_\w*", page.read_text()):
        # A family's name ends in a line, or in what stands for the rest.
        assert name in ours or (name.endswith("_") and any(one.startswith(name) for one in ours))


def test_what_the_package_reads_is_on_a_page() -> None:
    told = "".join(page.read_text() for page in PAGES)
    read = set(re.findall(r"[\"'](SGLANG_[A-Z_]+[A-Z])[\"']", "".join(SOURCES)))
    assert {"SGLANG_EPD_STORE", "SGLANG_VLM_CACHE_SIZE_MB"} <= read
    for name in read - INTERNAL:
        assert re.search(rf"\b{name}\b", told), name


def test_sglangs_flags_of_epd_are_on_a_page(launcher: argparse.ArgumentParser) -> None:
    told = "".join(page.read_text() for page in PAGES)
    prefixes = ("--encoder-", "--language-only", "--enable-adaptive", "--enable-prefix-mm", "--mm-")
    epd = {name for name in launcher._option_string_actions if name.startswith(prefixes)}
    assert len(epd) > 8
    # Of SGLang's own processing of media, with encoders and without.
    left = {name for name in epd if name.startswith("--mm-")} - {
        "--mm-enable-dp-encoder",
        "--mm-global-cache-backend",
        "--mm-process-config",
        "--mm-preprocess-cache-size-mb",
    }
    for name in epd - left:
        assert f"`{name}" in told or f"{name} " in told, name


def messages() -> set[str]:
    """The texts that the package hands on, with `…` for what is put into them."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return re.sub(r"%(?:\.\d)?[sdfr]", "…", node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        if isinstance(node, ast.BinOp):
            return text(node.left) + text(node.right)
        return "…"

    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call | ast.Return | ast.Yield):
                given = node.args if isinstance(node, ast.Call) else [node.value]
                found |= {text(one) for one in given if one is not None}
    return {one for one in found if len(one) > 10}


def quoted() -> list[str]:
    """The messages that troubleshooting goes by: code that a row begins with."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    return [one for one in named if " " in one]


def stands(message: str, told: set[str]) -> bool:
    """Whether its fixed parts stand in one of the texts, in order."""
    parts = [part.strip() for part in message.split("…") if part.strip(" :;(),.")]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(one) for one in told)


@pytest.fixture(scope="module")
def told() -> set[str]:
    return messages()


def test_troubleshooting_knows_many_messages() -> None:
    assert len(quoted()) > 40


@pytest.mark.parametrize("message", quoted())
def test_a_message_of_troubleshooting_is_one(message: str, told: set[str]) -> None:
    assert stands(message, told), message


def test_a_message_that_there_is_not_is_seen(told: set[str]) -> None:
    assert stands("no encoder is … to this server", {one for one in told if "known" in one})
    for wrong in ("no encoder is heard of by this server", "to this server … no encoder is"):
        assert not stands(wrong, told)
