"""Which servers a test needs, and one set of them at a time."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import requests

from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerError, ServerProcess, free_port, stop_all

START_TIMEOUT_S = 400.0
TOKEN = "the token of test servers"
# The reference of parity: SGLang's own image caches key by patches without their grid.
_NO_IMAGE_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
_LOOPBACK_MEDIA = {"SGLANG_EPD_MEDIA_ALLOWED_NETWORKS": "127.0.0.0/8"}


def checkpoint(name: str) -> str:
    """Path of a checkpoint, made on first use."""
    return str(ensure(name))


@dataclass
class Topology:
    """A set of servers, by role.

    Args:
        model: name of the checkpoint.
        roles: any of encoder, encoder2, language, colocated, prefill, decode, router.
            The language servers are told of `encoder`; `encoder2` registers itself.
        env: added to every server's environment.
    """

    model: str
    roles: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    servers: dict[str, ServerProcess] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, logs: Path) -> None:
        path = checkpoint(self.model)
        for role in self.roles:
            self.ports[role] = free_port()
            self.urls[role] = f"http://127.0.0.1:{self.ports[role]}"
        self.ports["prefill_bootstrap"] = free_port()
        self.ports["language_bootstrap"] = free_port()
        for role in self.roles:
            env = {**os.environ, **_NO_IMAGE_CACHE, **_LOOPBACK_MEDIA, **self.env}
            self.servers[role] = ServerProcess(
                role,
                self.command(role, path),
                log_path=logs / f"{role}.log",
                ready_url=f"{self.urls[role]}/health",
                env=env,
            )
            # The mini-lb asks its servers about themselves as it starts.
            if role != "router":
                self.servers[role].start()
        self._wait([role for role in self.roles if role != "router"])
        if "router" in self.roles:
            self.servers["router"].start()
            self._wait(["router"])

    def command(self, role: str, path: str) -> list[str]:
        """The command line that a user would type."""
        serve = [sys.executable, "-m", "sglang.launch_server", "--model-path", path]
        serve += ["--dtype", "float32", "--port", str(self.ports[role])]
        language = ["--language-only", "--encoder-urls", self.urls.get("encoder", "")]
        registry = self.ports["language_bootstrap"] if role == "language" else free_port()
        language += ["--encoder-bootstrap-port", str(registry)]
        bootstrap = str(self.ports["prefill_bootstrap"])
        registered = f"http://127.0.0.1:{self.ports['language_bootstrap']}"
        prefill = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", bootstrap]
        flags = {
            "encoder": ["--encoder-only"],
            "encoder2": ["--encoder-only", "--encoder-register-urls", registered],
            "language": language,
            "colocated": ["--disable-radix-cache"],
            "prefill": [*language, *prefill],
            "decode": ["--disaggregation-mode", "decode"],
        }
        if role == "router":
            router = [sys.executable, "-m", "sglang_router.launch_router"]
            router += ["--pd-disaggregation", "--mini-lb", "--port", str(self.ports["router"])]
            return [
                *router,
                *("--prefill", self.urls["prefill"], bootstrap),
                *("--decode", self.urls["decode"]),
            ]
        return [*serve, *flags[role]]

    def stop(self) -> None:
        stop_all(list(self.servers.values()))

    def check_alive(self) -> None:
        """Every server still runs and answers."""
        for role, server in self.servers.items():
            server.check_running()
            answer = requests.get(f"{self.urls[role]}/health", timeout=20)
            assert answer.status_code == 200, f"{role} answers /health with {answer.status_code}"

    def _wait(self, roles: list[str]) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        for role in roles:
            self.servers[role].wait_ready(max(1.0, end - time.monotonic()))


_FULL = ("encoder", "language", "colocated", "prefill", "decode", "router")
TOPOLOGIES = {
    "qwen2_5": lambda: Topology("tiny-qwen2_5-vl", _FULL),
    "qwen3": lambda: Topology("tiny-qwen3-vl", _FULL),
    "in_tree": lambda: Topology(
        "tiny-qwen2_5-vl", ("encoder", "language", "colocated"), {"SGLANG_EPD": "off"}
    ),
    "two_encoders": lambda: Topology(
        "tiny-qwen2_5-vl", ("encoder", "encoder2", "language"), {"SGLANG_EPD_TOKEN": TOKEN}
    ),
}


class Machine:
    """Keeps one topology up: two do not fit in the memory of a small machine."""

    def __init__(self) -> None:
        self._name = ""
        self._current: Topology | None = None

    def use(self, name: str) -> Topology:
        """The topology `name`, started if it is not up."""
        if self._name != name or self._current is None:
            self.clear()
            logs = Path(tempfile.mkdtemp(prefix=f"sglang-epd-test-{name}-"))
            self._current = TOPOLOGIES[name]()
            self._name = name
            try:
                self._current.start(logs)
            except ServerError:
                self.clear()
                raise
        return self._current

    def clear(self) -> None:
        if self._current is not None:
            self._current.stop()
        self._current = None
