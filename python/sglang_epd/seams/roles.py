"""The role of a server: whether this package serves it.

Leans on `runtime_context.publish(server_args, ...)`, which each of SGLang's processes calls
when it has loaded its plug-ins and before it serves anything.

SGLang loads plug-ins in its launcher, schedulers and detokenizers, but not in tokenizer
workers (`--tokenizer-worker-num` above 1): the HTTP server starts them from the name of an
application, `SGLANG_HTTP_SERVER_APP_PATH`. It is given this module's, which loads them first.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sglang_epd.errors import ConfigError
from sglang_epd.seams import hooks

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
_OURS = f"{__name__}:app"


def served(server_args: Any) -> bool:
    """Whether a server with these flags, of any version of SGLang, must not run without this
    package."""
    apart = ("encoder_only", "language_only")
    return any(getattr(server_args, flag, False) for flag in apart)


def hold(_result: Any, server_args: Any, *_args: Any, **_options: Any) -> None:
    """After `publish`: the hooks of this process hold, if its server is served.

    A decode server without an EPD flag works by itself, if slower, and gets a warning only.

    Raises:
        ConfigError: they do not.
    """
    if served(server_args):
        hooks.require()
    elif getattr(server_args, "disaggregation_mode", "") == "decode" and (why := hooks.misfit()):
        logger.warning("Prompts are laid out as SGLang does it: %s", why)


def registry() -> CollectorRegistry:
    """Where the metrics of this tokenizer process are registered: where SGLang's `/metrics` finds
    them with `--enable-metrics`, and else where an `Engine` after this one may have its own."""
    from prometheus_client import REGISTRY, CollectorRegistry
    from sglang.srt.runtime_context import get_observability

    return REGISTRY if get_observability().enable_metrics else CollectorRegistry()


def announce_workers() -> None:
    """In the launcher, before it starts its HTTP server: tokenizer workers begin here.

    Raises:
        ConfigError: another application is named.
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
