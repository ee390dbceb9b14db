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
import hashlib
import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checkpoints.families import SPECS, family_of

# What decides, beside a family's own modules, what is in a checkpoint: a change in one
# makes a new folder.
_SOURCES = (
    "spec.py",
    "tokenizer.py",
    "weights.py",
    "quantised.py",
    "build.py",
    "chat_template.jinja",
)


def cache_root() -> Path:
    """The folder that holds everything this project keeps outside its clone."""
    return Path(os.environ.get("SGLANG_EPD_CACHE") or Path.home() / ".cache" / "sglang-epd")


def ensure(name: str) -> Path:
    """Return the folder of checkpoint `name`, building it first where it is missing.

    Safe when several processes ask at once: each builds its own, and one wins.

    Raises:
        KeyError: no checkpoint has that name.
    """
    spec = SPECS[name]
    folder = cache_root() / "checkpoints" / f"{name}-{_digest(name)}"
    if folder.exists():
        return folder
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
    own = [
        Path(inspect.getfile(kind))
        for kind in type(family_of(name)).__mro__
        if kind.__module__.startswith("checkpoints.")
    ]
    common = [Path(__file__).parent / "checkpoints" / file for file in _SOURCES]
    for source in [*common, *own, *family_of(name).carried]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


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
