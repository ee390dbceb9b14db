"""Arms: which servers answer, with which flags, and on which cores or GPUs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import psutil

from sglang_epd.cli.processes import ServerError, ServerProcess, free_port, stop_all
from sglang_epd.schema import Data

HOST = "127.0.0.1"
# Of an arm's servers together. With GPUs a model of dozens of gigabytes may have to be fetched.
START_TIMEOUT_S = 400.0
START_TIMEOUT_WITH_GPUS_S = 1800.0
# Server processes that are up at a time: more do not fit into a small machine's memory.
MAX_SERVERS = 5

Role = Literal["server", "encoder", "language", "prefill", "decode", "router"]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVERS)]
Share = Annotated[int, msgspec.Meta(ge=0, le=4096)]


class Server(Data, frozen=True):
    """One kind of server of an arm.

    Attributes:
        role: "server" does all itself; the language and prefill servers are told of all
            encoders, the router of all prefill and decode servers, or of all servers that
            clients could ask.
        count: how many of it.
        flags: added to its command line.
        cores, gpus: how many of the arm's each of them has to itself; 0 is all of them,
            shared with the others that have 0.
    """

    role: Role
    count: Count = 1
    flags: str = ""
    cores: Share = 0
    gpus: Share = 0
    env: dict[str, str] = {}


class Arm(Data, frozen=True):
    """One way to serve a checkpoint.

    Attributes:
        name: the file's.
        title: what pages call it.
        family: arms of ours are "sglang-epd"; "in-tree" and "colocated" are what they are
            compared with.
        env: of all servers.
        servers: in the order in which they are started; clients ask the last one.
    """

    name: str
    title: str
    family: Literal["colocated", "in-tree", "sglang-epd"]
    servers: list[Server]
    env: dict[str, str] = {}

    def __post_init__(self) -> None:
        roles = [server.role for server in self.servers for _ in range(server.count)]
        if not roles or len(roles) > MAX_SERVERS:
            raise ValueError(f"{len(roles)} servers; 1 to {MAX_SERVERS} are possible")
        entry = self.servers[-1]
        if entry.count != 1 or entry.role not in ("server", "language", "router"):
            raise ValueError("the last server is the one that clients ask, one of its kind")
        have = set(roles)
        needs: dict[str, set[str]] = {
            "language": {"encoder"},
            "prefill": {"decode", "router"},
            "decode": {"prefill", "router"},
        }
        for role in have:
            if missing := needs.get(role, set()) - have:
                raise ValueError(f"{role} needs {' and '.join(sorted(missing))}")
        if "encoder" in have and not have & {"language", "prefill"}:
            raise ValueError("nobody asks the encoder")
        if "router" in have and not have & {"server", "language", "prefill"}:
            raise ValueError("the router has no servers")
        for server in self.servers:
            shlex.split(server.flags)

    @property
    def size(self) -> int:
        """Server processes, the router's included."""
        return sum(server.count for server in self.servers)


class Place(Data, frozen=True):
    """What an arm may use, the same for every arm.

    Attributes:
        cores: of the machine.
        gpus: CUDA's numbers; none on a machine without.
    """

    cores: list[int]
    gpus: list[int] = []

    def deal(self, arm: Arm) -> list[Place]:
        """The share of each of an arm's servers, in their order.

        Raises:
            ValueError: they ask for more than there is.
        """
        servers = [server for server in arm.servers for _ in range(server.count)]
        cores = _deal(self.cores, [server.cores for server in servers], f"{arm.name}: cores")
        gpus: list[list[int]] = [[] for _ in servers]
        if self.gpus:  # a router needs none
            using = [number for number, one in enumerate(servers) if one.role != "router"]
            wanted = [servers[number].gpus for number in using]
            shares = _deal(self.gpus, wanted, f"{arm.name}: GPUs")
            for number, share in zip(using, shares, strict=True):
                gpus[number] = share
        return [Place(cores=mine, gpus=cards) for mine, cards in zip(cores, gpus, strict=True)]


def _deal(things: Sequence[int], wanted: Sequence[int], what: str) -> list[list[int]]:
    left = list(things)
    if sum(wanted) > len(left) or (sum(wanted) == len(left) and 0 in wanted):
        raise ValueError(f"{what}: {sum(wanted)} are wanted by some servers, of {len(left)}")
    own = []
    for count in wanted:
        own.append(left[:count])
        del left[:count]
    return [mine or left for mine in own]


class Running:
    """An arm's servers. Start and stop them from the main thread.

    Args:
        model: a checkpoint's folder or name.
        flags: of every SGLang server (`--dtype float32`).
        place: where they are pinned.
        logs: folder of their logs.
    """

    def __init__(self, arm: Arm, model: str, flags: str, place: Place, logs: Path) -> None:
        self.arm = arm
        self._model, self._flags, self._logs = model, shlex.split(flags), logs
        self._place = place
        self._ports: list[tuple[Server, int, int]] = [
            (server, free_port(), free_port())
            for server in arm.servers
            for _ in range(server.count)
        ]
        self.servers: list[ServerProcess] = []
        self.commands: list[str] = []
        for number, share in enumerate(place.deal(arm)):
            self._add(number, share)

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://{HOST}:{self._ports[-1][1]}"

    def urls(self, role: Role) -> list[str]:
        return [f"http://{HOST}:{port}" for server, port, _ in self._ports if server.role == role]

    def start(self) -> float:
        """Start all and return the seconds until they were ready.

        Raises:
            ServerError: one did not start, or runs elsewhere than it is pinned to.
        """
        begin = time.monotonic()
        limit_s = START_TIMEOUT_WITH_GPUS_S if self._place.gpus else START_TIMEOUT_S
        routers = [
            server
            for server, (kind, _, _) in zip(self.servers, self._ports, strict=True)
            if kind.role == "router"
        ]
        # A router asks its servers about themselves as it starts.
        for group in ([one for one in self.servers if one not in routers], routers):
            for server in group:
                server.start()
            for server in group:
                server.wait_ready(max(1.0, begin + limit_s - time.monotonic()))
        self._check_pinned()
        return time.monotonic() - begin

    def stop(self) -> None:
        stop_all(self.servers)

    def _add(self, number: int, share: Place) -> None:
        server, port, _ = self._ports[number]
        command = self._router() if server.role == "router" else self._command(number)
        command += ["--port", str(port), *shlex.split(server.flags)]
        pinned = ["taskset", "--cpu-list", ",".join(map(str, share.cores)), *command]
        env = {**self.arm.env, **server.env}
        if share.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, share.gpus))
        shown = [f"{name}={value}" for name, value in env.items()]
        self.commands.append(shlex.join([*shown, *pinned]).replace(sys.executable, "python"))
        self.servers.append(
            ServerProcess(
                f"{self.arm.name} {server.role}",
                pinned,
                log_path=self._logs / f"{self.arm.name}-{number}-{server.role}.log",
                ready_url=f"http://{HOST}:{port}{_ready_path(server)}",
                env={**os.environ, **env},
            )
        )

    def _command(self, number: int) -> list[str]:
        server, _, bootstrap = self._ports[number]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self._model]
        command += self._flags
        encoders = self.urls("encoder")
        if server.role == "encoder":
            command += ["--encoder-only"]
        if server.role == "language" or (server.role == "prefill" and encoders):
            # A prefill server has another use for the port below.
            registry = bootstrap if server.role == "language" else free_port()
            command += ["--language-only", "--encoder-urls", *encoders]
            command += ["--encoder-bootstrap-port", str(registry)]
        if server.role in ("prefill", "decode"):
            command += ["--disaggregation-mode", server.role]
        if server.role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(bootstrap)]
        return command

    def _router(self) -> list[str]:
        command = [sys.executable, "-m", "sglang_router.launch_router"]
        if not self.urls("prefill"):
            return [*command, "--worker-urls", *self.urls("server"), *self.urls("language")]
        command += ["--pd-disaggregation"]
        for server, port, bootstrap in self._ports:
            url = f"http://{HOST}:{port}"
            if server.role == "prefill":
                command += ["--prefill", url, str(bootstrap)]
            if server.role == "decode":
                command += ["--decode", url]
        return command

    def _check_pinned(self) -> None:
        allowed = set(self._place.cores)
        for server in self.servers:
            root = psutil.Process(server.pid)
            for process in (root, *root.children(recursive=True)):
                if not set(process.cpu_affinity() or ()) <= allowed:
                    raise ServerError(f"{server.name}: process {process.pid} is not pinned")


def _ready_path(server: Server) -> str:
    # SGLang's router is healthy before it knows its servers; the mini-lb has no /readiness.
    apart = server.role == "router" and "--mini-lb" not in server.flags
    return "/readiness" if apart else "/health"
