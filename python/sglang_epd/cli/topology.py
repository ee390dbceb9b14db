"""The servers of a topology, and the flags of each: plain data, nothing is started.

The flags are those that a user would type, so that its servers can be run without `up`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sglang_epd.cli.places import Place, devices_of
from sglang_epd.errors import ConfigError
from sglang_epd.wire.urls import host_port

Role = Literal["encoder", "language", "prefill", "decode", "router"]

LOOPBACK = "127.0.0.1"
# Of SGLang's router. By its defaults a request whose media no encoder takes is sent five times,
# and two of them close the server to text, too.
PATIENT = ("--disable-circuit-breaker", "--retry-max-retries", "2")
# Flags that `up` decides itself; the same flag in a user's own would contradict it.
_OURS = {
    "--model",
    "--model-path",
    "--host",
    "--port",
    "--encoder-only",
    "--language-only",
    "--encoder-urls",
    "--encoder-bootstrap-port",
    "--disaggregation-mode",
    "--disaggregation-bootstrap-port",
    "--base-gpu-id",
    # All but one listen on the loopback interface, which wants no certificate.
    "--ssl-certfile",
    "--ssl-keyfile",
}


@dataclass(frozen=True)
class Shape:
    """The topology that was asked for.

    Attributes:
        encoders, language, prefill, decode: how many of each. Prefill and decode go
            together and without language servers, which do both.
        host: what the server that users talk to listens on; all others stay on the
            loopback interface.
        port: of that server; None for any.
        flags: SGLang flags as typed, by role; "all" for every server that runs a model.

    Raises:
        ConfigError: the numbers make no topology, a quote is not closed, or a flag is `up`'s
            own; by its name.
    """

    model: str
    encoders: int = 1
    language: int = 0
    prefill: int = 0
    decode: int = 0
    host: str = LOOPBACK
    port: int | None = None
    flags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("language", "prefill", "decode"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} must not be negative")
        if self.encoders < 1:
            raise ConfigError("--encoders must be at least 1")
        if (self.prefill > 0) != (self.decode > 0):
            given, missing = ("prefill", "decode") if self.prefill else ("decode", "prefill")
            raise ConfigError(
                f"--{given} needs --{missing} (servers that do both are --language N)"
            )
        if self.language and self.prefill:
            raise ConfigError(
                "--language with --prefill and --decode: prefill and decode are apart or together"
            )
        if not self.language and not self.prefill:
            raise ConfigError("--language must be at least 1 without --prefill and --decode")
        for role in self.flags:
            for word in self.words(role):
                if word.partition("=")[0] in _OURS:
                    raise ConfigError(f"--{_option(role)}: {word} is decided by `up` itself")

    def words(self, role: str) -> list[str]:
        """The flags typed for a role."""
        try:
            return shlex.split(self.flags.get(role, ""))
        except ValueError as error:
            raise ConfigError(f"--{_option(role)} {self.flags[role]!r}: {error}") from None

    def flags_of(self, role: Role) -> list[str]:
        """What is typed for all, then for the role, which counts where both say something."""
        return self.words("all") + self.words(role)


@dataclass(frozen=True)
class Server:
    """One server of a topology.

    Attributes:
        command: the argument vector, without the prefix of its place.
        url: where this machine reaches it.
        ready_path: answers 200 once it takes requests.
        needs: those that have to be ready before it starts.
    """

    name: str
    role: Role
    command: tuple[str, ...]
    url: str
    place: Place = field(default_factory=Place)
    ready_path: str = "/health"
    needs: tuple[str, ...] = ()

    def argv(self, python: str) -> list[str]:
        """The command with an interpreter, and on its cores."""
        return [*self.place.prefix, python, *self.command]

    def line(self) -> str:
        """The command as a user would type it, its environment in front."""
        settings = [f"{name}={value}" for name, value in self.place.env.items()]
        return shlex.join([*settings, *self.argv("python")])


@dataclass(frozen=True)
class Fleet:
    """All servers of a topology, in the order in which they are shown.

    Attributes:
        api_url: where this machine sends chat completions.
    """

    servers: tuple[Server, ...]
    api_url: str


def plan(shape: Shape, free_port: Callable[[], int], place: Callable[[int], Place]) -> Fleet:
    """Lay a topology out.

    Args:
        free_port: an unused port, each only once.
        place: devices for a server that asks for so many, each only once.
    """
    api_port = shape.port or free_port()
    apart = shape.prefill > 0
    behind_router = apart or shape.language > 1

    def model_server(name: str, role: Role, own: Sequence[str], *, api: bool = False) -> Server:
        port, host = (api_port, shape.host) if api else (free_port(), LOOPBACK)
        typed = shape.flags_of(role)
        command = ("-m", "sglang.launch_server", "--model-path", shape.model, *own)
        command += ("--host", host, "--port", str(port), *typed)
        return Server(name, role, command, _url(host, port), place(devices_of(typed)))

    def names(role: Role, number: int) -> list[str]:
        return [f"{role}-{index}" for index in range(number)] if number > 1 else [role]

    servers = [
        model_server(name, "encoder", ["--encoder-only"])
        for name in names("encoder", shape.encoders)
    ]
    urls = [encoder.url for encoder in servers]
    targets = ["--pd-disaggregation", "--mini-lb"] if apart else ["--worker-urls"]
    for name in names("prefill", shape.prefill) if apart else names("language", shape.language):
        # Its registration of encoders needs a port of its own beside other servers.
        own = ["--language-only", "--encoder-urls", *urls, "--encoder-bootstrap-port"]
        own += [str(free_port()), "--enable-metrics"]
        if apart:
            bootstrap = str(free_port())
            own += ["--disaggregation-mode", "prefill"]
            own += ["--disaggregation-bootstrap-port", bootstrap]
            servers.append(model_server(name, "prefill", own))
            targets += ["--prefill", servers[-1].url, bootstrap]
        else:
            servers.append(model_server(name, "language", own, api=not behind_router))
            targets.append(servers[-1].url)
    for name in names("decode", shape.decode) if apart else ():
        own = ["--disaggregation-mode", "decode", "--enable-metrics"]
        servers.append(model_server(name, "decode", own))
        targets += ["--decode", servers[-1].url]

    api_url = _url(shape.host, api_port)
    if behind_router:
        # Its own metrics would else be on one port for all routers of a machine, and on all
        # interfaces.
        metrics = ("--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port()))
        targets += [] if apart else [*metrics, *PATIENT]
        command = ("-m", "sglang_router.launch_router", *targets)
        command += ("--host", shape.host, "--port", str(api_port), *shape.words("router"))
        # SGLang's router asks its servers about themselves as it starts.
        needs = tuple(server.name for server in servers if server.role != "encoder")
        ready_path = "/health" if apart else "/readiness"
        servers.append(Server("router", "router", command, api_url, Place(), ready_path, needs))
    return Fleet(tuple(servers), api_url)


def _url(host: str, port: int) -> str:
    """The address by which this machine reaches a server that listens on `host`."""
    reached = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://{host_port(reached, port)}"


def _option(role: str) -> str:
    return "flags" if role == "all" else f"{role}-flags"
