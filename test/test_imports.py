"""Imports go one way, and SGLang is touched where it is said to be.

    entry
    plugin, cli
    seams
    encoder, language
    dispatch, transfer, cache, store, observability, namespace, families, decoding
    wire, media, modality, processes, device, checkpoint, config, errors, trust, deferred, machine,
    tally, spans, logs
    platform                      stands by itself beside all of them, but for an emulated
                                  accelerator

`sglang_epd_plan` is a package of its own: it imports what decides, and nothing imports it.

A package may import what stands below it. Packages of one row do not import each other,
but for the lowest row, where everybody may import `errors`.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sglang_epd
import sglang_epd_plan

ROOT = Path(sglang_epd.__file__).parent
PLAN = Path(sglang_epd_plan.__file__).parent
LAYERS = (
    {"entry"},
    {"plugin", "cli"},
    {"seams"},
    {"encoder", "language"},
    {"dispatch", "transfer", "cache", "store", "observability", "namespace", "families"}
    | {"decoding"},
    {"wire", "media", "modality", "checkpoint", "config", "errors", "trust", "deferred", "device"}
    | {"processes", "machine", "tally", "spans", "logs", "schema", "profile", "emulated"},
)
RANK = {package: rank for rank, row in enumerate(reversed(LAYERS)) for package in row}
# Same row, and allowed.
SIDEWAYS = {("wire", "errors"), ("media", "errors"), ("config", "errors"), ("trust", "errors")}
SIDEWAYS |= {
    ("processes", "errors"),
    ("spans", "errors"),
    ("wire", "modality"),
    ("media", "modality"),
}
# The schema of settings is one.
SIDEWAYS |= {("media", "config"), ("media", "processes"), ("checkpoint", "errors")}
SIDEWAYS |= {("schema", "errors"), ("profile", "errors"), ("profile", "schema")}
SIDEWAYS |= {("emulated", "config"), ("emulated", "profile")}
# What the platform imports of the rest; all but `deferred` and `entry` for an emulated accelerator.
OF_PLATFORM = {"deferred", "emulated", "entry", "errors", "observability", "profile"}
# Who may import sglang; only platform while it is being imported itself.
SGLANG = {
    "plugin.py",
    "checkpoint.py",
    "modality.py",
    "transfer/mooncake.py",
    "encoder/server.py",
    "encoder/sglang_metrics.py",
    "encoder/sglang_rpc.py",
    "encoder/towers.py",
    *(f"encoder/model/{name}.py" for name in ("engine", "loading", "preparing")),
}
SGLANG_PACKAGES = {"seams", "platform", "families"}
# What the planner imports of sglang_epd: the parts that decide, and the errors of both.
DECIDING = {
    *("cache.embeddings", "dispatch.policies", "dispatch.pool"),
    *("encoder.pipeline.scheduling", "errors", "transfer.extents", "wire.messages"),
    *("profile", "schema"),
}


@dataclass(frozen=True)
class Import:
    """One imported module: by whom, and whether while the importer itself is imported."""

    importer: str
    line: int
    module: str
    at_import: bool

    @property
    def package(self) -> str:
        """The importer's own package or module of ours."""
        return self.importer.split("/")[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def _walk(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, at_import and not inside)


def imports(root: Path = ROOT) -> list[Import]:
    found = []
    for path in sorted(root.rglob("*.py")):
        importer = path.relative_to(root).as_posix()
        for node, at_import in _walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                assert isinstance(node, ast.ImportFrom)
                assert not node.level, f"{importer}:{node.lineno}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [Import(importer, node.lineno, name, at_import) for name in names]
    return found


@functools.cache
def everything() -> list[Import]:
    return imports()


def ours() -> Iterator[tuple[Import, str]]:
    """Imports from one package of ours into another, with the latter's name."""
    for found in everything():
        top, *rest = found.module.split(".")
        if top == "sglang_epd" and rest and rest[0] != found.package:
            yield found, rest[0]


def test_every_package_has_its_layer():
    # A folder that only holds what was compiled has moved elsewhere.
    packages = {path.parent.stem for path in ROOT.glob("*/__init__.py")}
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__"}
    assert (packages | modules) - {"platform"} <= set(RANK), "add it to LAYERS, where it belongs"


def test_imports_go_down_only():
    upward = [
        str(found)
        for found, imported in ours()
        if found.package not in ("__init__", "platform")
        and imported != "platform"
        and RANK[imported] >= RANK[found.package]
        and (found.package, imported) not in SIDEWAYS
    ]
    assert not upward


def test_the_platform_stands_by_itself():
    others = [
        str(found)
        for found, imported in ours()
        if imported == "platform" or (found.package == "platform" and imported not in OF_PLATFORM)
    ]
    assert not others


def test_nothing_imports_the_planner():
    assert not [str(found) for found in everything() if "sglang_epd_plan" in found.module]


def test_the_planner_imports_what_decides():
    """And nothing of it that needs SGLang, sockets or an accelerator."""
    outside = {
        found.module.removeprefix("sglang_epd.").rpartition(".")[0]
        for found in imports(PLAN)
        if found.module.split(".")[0] in ("sglang_epd", "sglang")
    }
    assert outside == DECIDING


def _sglang() -> list[Import]:
    return [found for found in everything() if found.module.split(".")[0] == "sglang"]


def test_only_the_adapters_touch_sglang():
    strangers = [
        str(found)
        for found in _sglang()
        if found.importer not in SGLANG and found.package not in SGLANG_PACKAGES
    ]
    assert not strangers
    assert {found.package for found in _sglang()} >= {"seams", "platform", "encoder"}


def test_only_the_platform_imports_sglang_while_it_is_imported():
    early = [str(found) for found in _sglang() if found.at_import and found.package != "platform"]
    assert not early


def test_cuda_is_called_in_one_file():
    """Or no test on a CPU would see the order that it is called in."""
    callers = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    }
    callers |= {found.importer for found in everything() if found.module.startswith("torch.cuda")}
    assert callers == {"device/cuda.py"}


def test_hooks_are_made_where_all_of_them_are_listed():
    made = {"sglang_epd.seams.hooks.Hook", "sglang_epd.seams.hooks.install"}
    assert {found.importer for found in everything() if found.module in made} == {"plugin.py"}


def test_a_public_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_of_opentelemetry_its_interface_is_used_alone():
    by = [found for found in everything() if found.module.split(".")[0] == "opentelemetry"]
    assert {found.importer for found in by} == {"spans.py"}
    assert not [str(found) for found in by if found.module.startswith("opentelemetry.sdk")]


def test_nothing_is_unpickled_from_a_wire():
    picklers = {
        (found.importer, found.module)
        for found in everything()
        if found.module.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    }
    # SGLang's own language servers read pickles.
    assert picklers == {("encoder/sglang_rpc.py", "pickle.dumps")}


def test_the_walk_sees_imports_wherever_they_stand(tmp_path):
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "here.py").write_text(
        "import sglang_epd.encoder.app\n"
        "if True:\n    from sglang_epd import plugin\n"
        "def later():\n    import sglang.srt\n"
        "class Body:\n    from sglang import now\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import sglang.types\n"
    )
    found = {(seen.module, seen.at_import) for seen in imports(tmp_path)}
    assert found == {
        ("sglang_epd.encoder.app", True),
        ("sglang_epd.plugin", True),
        ("sglang.srt", False),
        ("sglang.now", True),
        ("typing.TYPE_CHECKING", True),
    }
    assert {seen.package for seen in imports(tmp_path)} == {"wire"}


def test_the_dependencies_are_declared():
    """Whatever is imported from outside is in pyproject.toml."""
    text = (ROOT.parents[1] / "pyproject.toml").read_text()
    names = {"PIL": "pillow", "zmq": "pyzmq", "prometheus_client": "prometheus-client"}
    names |= {"yaml": "pyyaml", "opentelemetry": "opentelemetry-api"}
    brought = {"yarl": "aiohttp", "starlette": "fastapi", "pydantic_core": "fastapi"}
    brought |= dict.fromkeys(("google", "grpc", "grpc_health", "smg_grpc_proto"), "sglang")
    brought |= dict.fromkeys(
        ("httpx", "huggingface_hub", "torchaudio", "torchcodec", "torchvision", "transformers"),
        "sglang",
    )
    undeclared = set()
    for found in [*everything(), *imports(PLAN)]:
        top = found.module.split(".")[0]
        if top.startswith("sglang_epd") or top in sys.stdlib_module_names:
            continue
        if f'"{names.get(top, brought.get(top, top))}' not in text.replace("_", "-"):
            undeclared.add(top)
    assert not undeclared
