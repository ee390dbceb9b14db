from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import uvicorn

from packages import sglang_module
from sglang_epd import plugin
from sglang_epd.seams import hooks
from sglang_epd.seams.contract import SIGNATURES


@pytest.fixture(scope="session")
def sglang() -> Callable[[str], ModuleType]:
    """A module of `sglang.srt` by its name, when all that this package leans on has been
    imported."""
    sglang_module("plugins.hook_registry", *sorted({module for _, module, _ in SIGNATURES}))
    return lambda name: sys.modules[f"sglang.srt.{name}"]


@pytest.fixture
def flags(
    sglang: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Sets SGLang's flags as `runtime_context` answers them, by kind: `disagg={...}`."""
    serving = ("api_key", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
    defaults = {
        "disagg": {"language_only": False, "encoder_only": False},
        "serving": {"tokenizer_worker_num": 1, **dict.fromkeys(serving)},
    }
    defaults["disagg"]["enable_adaptive_dispatch_to_encoder"] = False

    def set_flags(**kinds: dict[str, Any]) -> None:
        for kind, given in kinds.items():
            told = SimpleNamespace(**{**defaults.get(kind, {}), **given})
            monkeypatch.setattr(sglang("runtime_context"), f"get_{kind}", lambda told=told: told)

    return set_flags


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """An application, served as SGLang serves its own; where it is."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as opened:
        serving = asyncio.create_task(server.serve([opened]))
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.fixture
def hooked(
    sglang: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Applies a hook of the table to SGLang itself, until the test is over."""
    monkeypatch.setattr(hooks, "_state", hooks._State())

    def apply(attribute: str) -> None:
        (hook,) = [one for one in plugin.HOOKS if one.attribute == attribute]
        owner, _, name = attribute.rpartition(".")
        holder = sys.modules[hook.module]
        holder = getattr(holder, owner) if owner else holder
        original = getattr(holder, name)
        # Are put back.
        monkeypatch.setattr(holder, name, original)
        for module in list(sys.modules.values()) if not owner else ():
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                monkeypatch.setattr(module, name, original)
        hooks.install([hook])

    return apply


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Writes modules that can be imported, and forgets them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(tmp_path).parents:
                if parent != Path():
                    (tmp_path / parent / "__init__.py").touch()
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
