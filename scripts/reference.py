#!/usr/bin/env python3
"""Writes what follows from the code and from other pages: docs/settings.md, docs/metrics.md,
docs/command.md, the tables of files in docs/design/, and the claims in benchmark/results/README.md.

scripts/reference.py            # write them
scripts/reference.py --check    # fail where one is not as it would be written
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typer.core import TyperGroup

import claims
from sglang_epd import config
from sglang_epd.cli.main import app
from sglang_epd.config import Settings
from sglang_epd.observability.emulation import EmulationMetrics
from sglang_epd.observability.encoder import EncoderMetrics, StoreMetrics
from sglang_epd.observability.language import (
    DecisionMetrics,
    DecodeMetrics,
    DispatchMetrics,
    EarlyMetrics,
    ReceiverMetrics,
    weights_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "python" / "sglang_epd"
# In a page of docs/design/: files and folders below PACKAGE, and their table.
_FILES = re.compile(r"<!-- files: (.*?) -->\n.*?<!-- end of files -->", re.DOTALL)


class Declared(NamedTuple):
    """One setting, as people are told of it.

    Attributes:
        variable: its name in the environment.
        values: what it takes.
        default: as it would be typed; empty for none.
        servers: which read it.
        text: what it does.
    """

    variable: str
    values: str
    default: str
    servers: str
    text: str


# A setting in the docstring of `Settings`: its name, the servers that read it, its text.
_SETTING = re.compile(r"^ {4}(\w+)(?: \[(.+?)\])?: (.+?)(?=^ {4}\w|\Z)", re.MULTILINE | re.DOTALL)
_DECODING = "encoders; language with `--enable-adaptive-dispatch-to-encoder`"
# Read by `plugin`, by SGLang, and before any setting is.
_SWITCHES = (
    Declared(
        "SGLANG_EPD",
        "on, off",
        "on",
        "all",
        "`off`, also `0`, `false` and `no`: SGLang's own EPD, unchanged. Anything else is on.",
    ),
    Declared(
        "SGLANG_PLUGINS",
        "names, with commas between",
        "",
        "all",
        "SGLang's: the plug-ins that are loaded. `sglang_epd_cpu`: the CPU platform only.",
    ),
    Declared(
        "SGLANG_VLM_CACHE_SIZE_MB",
        "whole number",
        "4096",
        "encoders with `--enable-prefix-mm-cache`",
        "SGLang's: embeddings kept for later requests. 0 is taken as not set: SGLang sets it "
        "so for Qwen3-VL on Hopper GPUs.",
    ),
)
_SETTINGS_HEAD = """# Settings

What SGLang has a flag for is set by SGLang's flags. The rest is on this page. A server reads it once, when it starts, from its environment; an unknown name, or a value out of range, ends the server and is named. Servers of `sglang-epd up` have its environment.

Encoders, language, prefill and decode servers need the same `SGLANG_EPD_TOKEN`. In the column *servers*, *language* includes prefill servers.

"""  # noqa: E501
_METRICS_HEAD = """# Metrics

Encoders show these at `/metrics`, with `--grpc-mode` at `SGLANG_EPD_ENCODER_HTTP_PORT`. Language, prefill and decode servers show them among SGLang's own, with `--enable-metrics`. `docker/observability/` has a Grafana dashboard and alert rules over them.

A histogram has `_bucket`, `_sum` and `_count` behind its name. A metric with labels is shown once it has counted. Labels take few values, none of them a user's to choose.

"""  # noqa: E501
_SGLANGS_HEAD = """## Encoders, by SGLang's names

With `--enable-metrics` an encoder shows these, too, with SGLang's labels and buckets, for dashboards and alerts of in-tree EPD; `--extra-metric-labels` adds labels. They differ in this:

- `dp_rank` is 0: towers of one encoder are counted together. `sglang:encoder_dp_pending_requests` is the exception. It counts the items of each tower, and is there for one tower, too.
- A request with items of several modalities counts once for each. A pass of several modalities is divided between them by items.
- A cache hit is an item that took no pass of its own: it was in the cache, in the store, or in the making for another request.
- Refused requests are not counted.

"""  # noqa: E501
_COMMAND_HEAD = """# The sglang-epd command

`--json`, where there is one, prints one document for machines. Exit codes: 0 success, 1 a failure or options that do not go together, 2 an option that is unknown or has no such value; `sglang-epd --install-completion` completes names in your shell.

"""  # noqa: E501


def declared() -> list[Declared]:
    """All of `Settings`, in their order."""
    told = {
        name: (servers or _DECODING, " ".join(text.split()))
        for name, servers, text in _SETTING.findall(inspect.cleandoc(Settings.__doc__ or ""))
    }
    return [
        Declared(
            name, config.bounds(one.type).title or "", config.typed(one.default), *told[one.name]
        )
        for name, one in config.variables().items()
    ]


def _of_media(one: Declared) -> bool:
    return one.variable.startswith("SGLANG_EPD_MEDIA_")


def settings_page() -> str:
    """docs/settings.md."""
    parts = [
        ("Switches", _SWITCHES),
        ("Requests, encoders and stores", [one for one in declared() if not _of_media(one)]),
        ("Media", [one for one in declared() if _of_media(one)]),
    ]
    tables = (f"## {title}\n\n{_table(rows)}" for title, rows in parts)
    return _SETTINGS_HEAD + "\n".join(tables)


def _table(settings: Iterable[Declared]) -> str:
    rows = "".join(
        f"| `{one.variable}` | {f'`{one.default}`' if one.default else ''} | {one.values} "
        f"| {one.servers} | {one.text} |\n"
        for one in settings
    )
    return f"| variable | default | values | servers | |\n|---|---|---|---|---|\n{rows}"


def metrics() -> dict[str, list[Any]]:
    """The metrics of each kind of server, as the objects that count."""
    encoder, language, decode = EncoderMetrics().registry, CollectorRegistry(), CollectorRegistry()
    emulated = CollectorRegistry()
    EmulationMetrics(emulated)
    StoreMetrics(encoder)
    for metrics in (DispatchMetrics, DecisionMetrics, ReceiverMetrics, EarlyMetrics):
        metrics(language)
    DecodeMetrics(decode)
    return {
        "Encoders": _metrics_of(encoder),
        "Language and prefill servers": [*_metrics_of(language), weights_bytes()],
        "Decode servers": _metrics_of(decode),
        "All of them, with `SGLANG_EPD_EMULATE`": _metrics_of(emulated),
    }


def _metrics_of(registry: CollectorRegistry) -> list[Any]:
    # Its only list of what counts, rather than of what has been counted so far.
    return list(registry._collector_to_names)


def samples_of(metric: Any) -> list[str]:
    """The names under which a metric can be asked for."""
    name = metric.describe()[0].name
    endings: dict[type, list[str]] = {
        Counter: ["_total"],
        Histogram: ["_bucket", "_sum", "_count"],
        Gauge: [""],
    }
    return [name + ending for ending in endings[type(metric)]]


def sglang_encoder_metrics() -> list[tuple[str, str, list[str]]]:
    """The name, kind and labels of each metric of SGLang's encoders, from its source."""
    found = []
    srt = Path(next(iter(find_spec("sglang").submodule_search_locations))) / "srt"  # type: ignore[union-attr,arg-type]
    for path in ("observability/metrics_collector.py", "disaggregation/encoder/runtime.py"):
        for node in ast.walk(ast.parse((srt / path).read_text())):
            given = {word.arg: word.value for word in getattr(node, "keywords", ())}
            name = getattr(given.get("name"), "value", "")
            if str(name).startswith("sglang:encoder_"):
                more = re.findall(r"'(\w+)'", ast.unparse(given["labelnames"]))
                labels = dict.fromkeys(["model_name", *more, "dp_rank"])
                found.append((name, ast.unparse(node.func).lower(), list(labels)))  # type: ignore[attr-defined]
    return found


def metrics_page() -> str:
    """docs/metrics.md."""
    rows = "".join(
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} |\n"
        for name, kind, labels in sglang_encoder_metrics()
    )
    beside = f"{_SGLANGS_HEAD}| metric | kind | labels |\n|---|---|---|\n{rows}"
    parts = []
    for title, found in metrics().items():
        rows = "".join(_metric_row(metric) for metric in found)
        parts.append(f"## {title}\n\n| metric | kind | labels | |\n|---|---|---|---|\n{rows}")
    return _METRICS_HEAD + "\n".join([*parts, beside])


def _metric_row(metric: Any) -> str:
    told = metric.describe()[0]
    name = samples_of(metric)[0].removesuffix("_bucket")
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"| `{name}` | {told.type} | {labels} | {told.documentation} |\n"


def command_page() -> str:
    """docs/command.md."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return _COMMAND_HEAD + "\n".join(_command(one) for one in group.commands.values())


def _command(command: Any) -> str:
    # Lines of a paragraph are one line here.
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    text = "\n\n".join(" ".join(part.split()) for part in paragraphs)
    rows = "".join(map(_option, command.params))
    return f"## sglang-epd {command.name}\n\n{text}\n\n| | default | |\n|---|---|---|\n{rows}"


def _option(option: Any) -> str:
    names = [option.metavar] if option.param_type_name == "argument" else option.opts
    shown = ", ".join(f"`{name}`" for name in names)
    default = "required" if option.required else _default(option.default)
    return f"| {shown} | {default} | {option.help} |\n"


def _default(value: Any) -> str:
    if value is None or value == "" or isinstance(value, bool):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def files_of(page: str) -> list[Path]:
    """The Python files that the page of a package has a table of."""
    places = [place for found in _FILES.finditer(page) for place in found[1].split()]
    files: list[Path] = []
    for path in ((PACKAGE / place).resolve() for place in places):
        files += sorted(path.glob("[!_]*.py")) if path.is_dir() else [path]
    return files


def design_page(page: str) -> str:
    """The page, with the first sentence of each file's docstring in its table of files."""

    def table(found: re.Match[str]) -> str:
        rows = "".join(f"| `{_short(file)}` | {_summary(file)} |\n" for file in files_of(found[0]))
        head = f"<!-- files: {found[1]} -->\n\n| file | |\n|---|---|\n"
        return f"{head}{rows}\n<!-- end of files -->"

    return _FILES.sub(table, page)


def _short(file: Path) -> str:
    return file.relative_to(PACKAGE.parent).as_posix().removeprefix("sglang_epd/")


def _summary(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def pages() -> Iterator[tuple[Path, str]]:
    """Each page's place, and what belongs there."""
    yield DOCS / "settings.md", settings_page()
    yield DOCS / "metrics.md", metrics_page()
    yield DOCS / "command.md", command_page()
    for path in sorted((DOCS / "design").glob("*.md")):
        yield path, design_page(path.read_text())
    yield claims.CLAIMS, claims.page([ROOT / "README.md", *sorted(DOCS.rglob("*.md"))])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in pages() if not path.exists() or path.read_text() != text]
    for path, text in pages():
        if path in stale and not check:
            path.write_text(text)
    for path in stale:
        print(f"{path.name} {'is not up to date: scripts/reference.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
