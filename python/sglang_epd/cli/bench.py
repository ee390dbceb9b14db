"""`sglang-epd bench`: arms side by side, `benchmark/compare.py` of the source tree.

The comparison needs photographs, checkpoints and arms that no wheel has, so it runs from a
checkout of this package alone; what is typed is handed on as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

import sglang_epd
from sglang_epd.errors import ConfigError

# Options are compare.py's own, `--help` included.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Compare this package with one server and SGLang's own EPD at equal cores, or GPUs.

    Options are those of `benchmark/compare.py`: `sglang-epd bench --help` shows them. Runs from
    a checkout of the source tree only.
    """
    program = entry(Path(sglang_epd.__file__))
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(program), *context.args])


def entry(package: Path) -> Path:
    """The comparison that belongs to an installed package.

    Args:
        package: its `__init__.py`.

    Raises:
        ConfigError: the package was not installed from a checkout (`pip install -e`).
    """
    program = package.resolve().parents[2] / "benchmark" / "compare.py"
    if not program.is_file():
        raise ConfigError(
            "the comparison is not part of the installed package: clone its source tree, and "
            "run scripts/install and .venv/bin/sglang-epd bench there"
        )
    return program
