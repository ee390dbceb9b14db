#!/usr/bin/env python3
"""Prints the path of a small random checkpoint, building it when it is not there yet.

    scripts/make_checkpoint.py tiny-qwen2_5-vl
    scripts/make_checkpoint.py bench-qwen3-vl --check

Checkpoints are kept in `${SGLANG_EPD_CACHE:-~/.cache/sglang-epd}/checkpoints`, each under
its name and a digest of the code that builds it. `--check` also measures, with the model
of `transformers`, how far the output depends on the media, and fails below the bounds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

_SCRIPTS = Path(__file__).parent
_PACKAGE = _SCRIPTS / "checkpoints"
sys.path.insert(0, str(_SCRIPTS))

# As it was when this process began: what is imported here stays what it was, however the
# files are edited meanwhile.
_CODE = {path: path.read_bytes() for path in _PACKAGE.rglob("*.py")}

from checkpoints.families import SPECS, family_of  # noqa: E402

# Python 3.11 parses in one thread at a time ("AST constructor recursion depth mismatch").
_PARSING = threading.Lock()
# What decides what is in a checkpoint, beside its family's own module, is what these two
# import of the package, and files that are no code.
_BUILDER = _PACKAGE / "build.py"
_TEMPLATE = _PACKAGE / "chat_template.jinja"


def cache_root() -> Path:
    """The folder that holds everything this project keeps outside its clone."""
    return Path(os.environ.get("SGLANG_EPD_CACHE") or Path.home() / ".cache" / "sglang-epd")


def ensure(name: str) -> Path:
    """Return the folder of checkpoint `name`, building it first where it is missing.

    Safe when several processes ask at once: each builds its own, and one wins.

    Raises:
        KeyError: no checkpoint has that name.
        RuntimeError: it is missing, and its code was edited since this process began.
    """
    spec = SPECS[name]
    folder = cache_root() / "checkpoints" / f"{name}-{_digest(name)}"
    if folder.exists():
        return folder
    if edited := [path.name for path in _sources(name) if path.read_bytes() != _CODE[path]]:
        raise RuntimeError(f"{name} cannot be built: {edited} changed since this process began")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        from checkpoints.build import build

        build(family_of(name), spec, temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _digest(name: str) -> str:
    """Names the content of a checkpoint by the code that makes it."""
    digest = hashlib.sha256(repr(SPECS[name]).encode())
    for source in _sources(name):
        digest.update(_CODE[source])
    for file in (_TEMPLATE, *family_of(name).carried):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _sources(name: str) -> list[Path]:
    """The modules that make a checkpoint: its family's and the builder, and of the package
    all that they import, wherever in them and through whatever other modules."""
    found: set[Path] = set()
    left = [_file(type(family_of(name)).__module__), _BUILDER]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _imports(_CODE[path])
    return sorted(found)


def _imports(code: bytes) -> list[Path]:
    """The package's modules that a module of it names in its imports."""
    names: list[str] = []
    with _PARSING:
        tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # What is imported from a package may be a module of it.
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ours = (_file(name) for name in names if name.startswith(f"{_PACKAGE.name}."))
    return [path for path in ours if path in _CODE]


def _file(module: str) -> Path:
    return _SCRIPTS.joinpath(*module.split(".")).with_suffix(".py")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(SPECS))
    parser.add_argument("--check", action="store_true", help="measure it, fail below the bounds")
    options = parser.parse_args()
    folder = ensure(options.name)
    print(folder)
    if not options.check:
        return 0
    from checkpoints.check import measure

    failures = 0
    for measurement in measure(folder):
        print(measurement)
        failures += not measurement.passed
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
