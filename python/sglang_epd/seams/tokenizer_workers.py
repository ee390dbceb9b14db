"""Tokenizer workers (`--tokenizer-worker-num` above 1) with SGLang's plug-ins in them.

SGLang loads plug-ins in its launcher, schedulers and detokenizers, but not in these: the
HTTP server starts them from the name of an application,
`SGLANG_HTTP_SERVER_APP_PATH`. It is given this module's, which loads them first.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_epd.errors import ConfigError

_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
_OURS = f"{__name__}:app"


def announce() -> None:
    """In the launcher, before it starts its HTTP server: workers begin here.

    Raises:
        ConfigError: the user has named another application.
    """
    named = os.environ.get(_VARIABLE, _OURS)
    if named != _OURS:
        raise ConfigError(
            f"{_VARIABLE}={named} with several tokenizer workers: they would start without "
            "this plug-in"
        )
    os.environ[_VARIABLE] = _OURS


def __getattr__(name: str) -> Any:
    """`app`, asked for by the HTTP server in a worker that it has just started."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import app

    return app
