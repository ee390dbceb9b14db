"""Entry point of `sglang.srt.plugins`: starts the plug-in, or ends a server that needs it.

SGLang logs the exception of a plug-in and goes on, with its own EPD. So a server with an
EPD role ends here instead, by `SystemExit`, which SGLang does not catch. This module
imports nothing of the package at module level: an installation that lacks a dependency
is one of the failures.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

SWITCH = "SGLANG_EPD"
# The shortest forms of the flags that SGLang's argument parser takes for no other.
_FLAGS = ("--encoder-o", "--language-o")
_LINE = re.compile(
    r"""^["']?(encoder|language)[-_]only["']?\s*:\s*["']?(true|yes|on)\b""", re.I | re.M
)


def enabled() -> bool:
    """Whether this package takes over EPD in this process."""
    return os.environ.get(SWITCH, "").strip().lower() not in {"off", "0", "false", "no"}


def names_role(arguments: Sequence[str]) -> bool:
    """Whether a command line, or the file that its `--config` names, asks for an EPD role."""
    for argument, value in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument.startswith(_FLAGS):
            return True
        if argument == "--config" and Path(value).is_file():
            return _LINE.search(Path(value).read_text(errors="replace")) is not None
    return False


def register() -> None:
    """Called by SGLang in the launcher and in each of its processes.

    Raises:
        SystemExit: this server has an EPD role, and the plug-in cannot serve it.
    """
    if not enabled():
        return
    role = names_role(sys.argv[1:])
    try:
        from sglang_epd import plugin

        plugin.register(role=role)
    except Exception as error:
        if not role:
            raise
        raise SystemExit(f"sglang-epd ends this server, which has an EPD role: {error}") from error
