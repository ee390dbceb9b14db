"""Which servers a test needs, and one set of them at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests

from checkpoints.families import FAMILIES
from checkpoints.family import Family
from integration.client import Client, Generation
from integration.forked import ForkedServer, ForkServer
from make_checkpoint import ensure
from sglang_epd.cli.processes import ServerError, ServerProcess, free_port, stop_all

START_TIMEOUT_S = 400.0
# An idle server's.
STOP_TIMEOUT_S = 15.0
# SGLang's NUM_DERIVED_PORTS, and the one before them.
_DERIVED_PORTS = 7
TOKEN = "the token of test servers"
# What SGLang's /health does in a second, of which it sleeps the most.
_PING: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
# Of a prefill and of a decode server alone: SGLang's FAKE_BOOTSTRAP_HOST.
_PING_APART: dict[str, Any] = {**_PING, "bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
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
        roles: any of encoder, registering (an encoder that registers itself), language,
            colocated, caching (one server that does all, and keeps what it can), prefill,
            decode, router. Each may be there several times, told
            apart by what follows an "@"; the language and prefill servers are told of
            all encoders, and the router of all prefill and decode servers. What has the name
            of another and a "#" is the same server on its next host.
        env: added to every server's environment.
        flags: added to the command lines of a role, or of one server.
        own_env: added to one server's environment.
        forks: what servers are forks of; None starts each as a user does.
        typed: roles that are started as a user does, the first time.
        served_as: `--model-path`, where that is not the checkpoint's folder.
    """

    model: str
    roles: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    own_env: dict[str, dict[str, str]] = field(default_factory=dict)
    forks: ForkServer | None = None
    typed: tuple[str, ...] = ()
    served_as: str = ""
    servers: dict[str, ServerProcess] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def one_server(self) -> bool:
        """Whether it is what others are compared with."""
        return self.roles == ("colocated",)

    def start(self, logs: Path) -> None:
        for role in self.roles:
            self.ports[role] = free_port()
            self.urls[role] = f"http://127.0.0.1:{self.ports[role]}"
            for use in ("bootstrap", "group"):
                self.ports[f"{role} {use}"] = free_port()
            if "--enable-dp-attention" in self._flags(role):
                # Several hosts meet at the ports behind their group's, too.
                for _ in range(_DERIVED_PORTS):
                    free_port()
            if "--grpc-mode" in self._flags(role):
                self.ports[f"{role} grpc"] = free_port()
        for role in self.roles:
            self.servers[role] = self._server(role, logs)
            # The mini-lb asks its servers about themselves as it starts.
            if role != "router":
                self.servers[role].start()
        self._wait([role for role in self.roles if role != "router"])
        if "router" in self.roles:
            self.servers["router"].start()
            self._wait(["router"])

    def start_again(self, *roles: str) -> None:
        """Start those servers that have ended, together, and wait for them."""
        ended = [role for role in roles if not self.servers[role].running]
        for role in ended:
            self.servers[role].start()
        self._wait(ended)

    def client(self, role: str = "language", headers: dict[str, str] | None = None) -> Client:
        return Client(self.urls[role], headers)

    def log(self, role: str) -> str:
        return self.servers[role].log_path.read_text()

    def end(self, role: str) -> None:
        """Tell a server to stop, if it runs.

        Raises:
            ServerError: it does not end by itself.
        """
        server = self.servers[role]
        if server.running:
            os.kill(server.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_TIMEOUT_S
            while server.running:
                if time.monotonic() > end:
                    raise ServerError(f"{role} does not end:\n{server.tail()}")
                time.sleep(0.05)
        server.stop()

    def restart(self, *roles: str, **env: str) -> None:
        """End servers, and start them anew, together, with more in their environment; as forks
        wherever that can be.

        Raises:
            ServerError: one does not end by itself, or not start.
        """
        for role in roles:
            self.end(role)
        for role in roles:
            logs = self.servers[role].log_path.parent
            self.servers[role] = self._server(role, logs, env, typed=False)
            self.servers[role].start()
        self._wait(list(roles))

    def _server(
        self, role: str, logs: Path, more: Mapping[str, str] | None = None, *, typed: bool = True
    ) -> ServerProcess:
        encoder = role.startswith(("encoder", "registering"))
        by_grpc = f"{role} grpc" in self.ports
        cache = {} if encoder else _NO_IMAGE_CACHE
        forks = None if typed and role in self.typed else self.forks
        make = partial(ForkedServer, forks) if forks is not None else ServerProcess
        return make(
            role,
            self.command(role, self.served_as or checkpoint(self.model)),
            log_path=logs / f"{role}.log",
            ready_url=self.urls[role] + self._readiness(role),
            env={
                **os.environ,
                **cache,
                **_LOOPBACK_MEDIA,
                **self.env,
                **self.own_env.get(role, {}),
                **({"SGLANG_EPD_ENCODER_HTTP_PORT": str(self.ports[role])} if by_grpc else {}),
                **(more or {}),
            },
        )

    def command(self, role: str, path: str) -> list[str]:
        """The command line that a user would type."""
        name = role.partition("#")[0]
        kind = name.partition("@")[0]
        if kind == "router":
            return self._router()
        encoders = [self._encoder_url(name) for name in self._named("encoder")]
        bootstrap = str(self.ports[f"{name} bootstrap"])
        language = ["--language-only", "--encoder-urls", *encoders]
        # A prefill server has another use for the port below.
        registry = bootstrap if kind == "language" else str(free_port())
        language += ["--encoder-bootstrap-port", registry]
        prefill = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", bootstrap]
        own = {
            "encoder": ["--encoder-only"],
            "registering": ["--encoder-only"],
            "language": language,
            "colocated": ["--disable-radix-cache"],
            "caching": ["--enable-cache-report"],
            "prefill": [*language, *prefill],
            "decode": ["--disaggregation-mode", "decode", "--enable-metrics"],
        }[kind]
        if kind == "decode" and "--enable-pd-role-switch" in self._flags(role):
            # It may become the other.
            own = [*own, *language, *prefill[2:]]
        if kind == "registering":
            registry = f"http://127.0.0.1:{self.ports['language bootstrap']}"
            own += ["--encoder-register-urls", registry]
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", path),
            *("--dtype", "float32"),
            *("--port", str(self.ports.get(f"{role} grpc", self.ports[role]))),
            *own,
            *self._place(role),
            *self._meeting(role),
            *self._flags(role),
        ]

    def _meeting(self, role: str) -> list[str]:
        """Where a server's process group meets: of 8000 ports SGLang draws one many seconds
        before it binds it, and another server may have drawn the same. Replicas each need one,
        which SGLang draws."""
        return [] if "--dp-size" in self._flags(role) else ["--nccl-port", str(free_port())]

    def _place(self, role: str) -> list[str]:
        """Which host of a server this is, where it has several."""
        first = role.partition("#")[0]
        hosts = [name for name in self.roles if name.partition("#")[0] == first]
        if hosts == [role]:
            return []
        address = f"127.0.0.1:{self.ports[f'{first} group']}"
        count, rank = str(len(hosts)), str(hosts.index(role))
        return ["--nnodes", count, "--node-rank", rank, "--dist-init-addr", address]

    def _flags(self, role: str) -> list[str]:
        name = role.partition("#")[0]
        kinds = dict.fromkeys((name.partition("@")[0], name))
        return [flag for kind in kinds for flag in shlex.split(self.flags.get(kind, ""))]

    def _encoder_url(self, role: str) -> str:
        port = self.ports.get(f"{role} grpc")
        return f"grpc://127.0.0.1:{port}" if port else self.urls[role]

    def _router(self) -> list[str]:
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--port", str(self.ports["router"])]
        for name in self._named("prefill"):
            command += ["--prefill", self.urls[name], str(self.ports[f"{name} bootstrap"])]
        for name in self._named("decode"):
            command += ["--decode", self.urls[name]]
        return command + shlex.split(self.flags.get("router", "--mini-lb"))

    def _readiness(self, role: str) -> str:
        if _generates(role):
            return "/ready"  # at once, where /health sleeps for a second
        # SGLang's router is healthy before it knows its servers; the mini-lb has no more.
        mini = "--mini-lb" in self.flags.get("router", "--mini-lb")
        return "/readiness" if role == "router" and not mini else "/health"

    def _named(self, kind: str) -> list[str]:
        return [one for one in self.roles if one.partition("@")[0] == kind and "#" not in one]

    def stop(self) -> None:
        stop_all(list(self.servers.values()))

    def check_alive(self) -> None:
        """Every server still runs and answers."""
        for server in self.servers.values():
            server.check_running()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            answers = list(pool.map(self._ping, self.servers))
        for role, answer in zip(self.servers, answers, strict=True):
            assert answer.status_code == 200, f"{role} is ill: {answer.status_code} {answer.text}"

    def _ping(self, role: str) -> requests.Response:
        url, kind = self.urls[role], role.partition("@")[0]
        if not _generates(role) or "--is-embedding" in self._flags(role):
            return requests.get(f"{url}/health", timeout=20)
        ping = _PING_APART if kind in ("prefill", "decode") else _PING
        return requests.post(f"{url}/generate", json=ping, timeout=20)

    def _wait(self, roles: list[str]) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        for role in roles:
            self.servers[role].wait_ready(max(1.0, end - time.monotonic()))


def _generates(role: str) -> bool:
    """Whether a role is a server of SGLang's that answers prompts; a further host has none."""
    kinds = ("encoder", "registering", "router")
    return not role.startswith(kinds) and "#" not in role


_TINY = "tiny-qwen2_5-vl"
_FP8 = "tiny-qwen3-vl-fp8"
_FULL = ("encoder", "language", "prefill", "decode", "router")
_TOGETHER = ("encoder", "language")
_APART = ("encoder", "prefill", "decode", "router")
_TP2 = "--tp 2"
_PP2 = "--pp-size 2"
_TO_TOKENIZER = "--encoder-transfer-backend zmq_to_tokenizer"
_DPA = f"{_TP2} --dp-size 2 --enable-dp-attention"
_CACHE = "--enable-prefix-mm-cache"
# Encoders are asked again for each picture.
_NOTHING_KEPT = {"SGLANG_EPD_EMBEDDING_CACHE_MB": "0"}
# Prompts of tests are too short to be prefilled in parts otherwise.
EARLY = {"SGLANG_EPD_PREFILL_EARLY": "on"}
_NO_PREFIXES = "--disable-radix-cache"
# Answers of /v1/responses, for those that go on from them.
_STORED = "--enable-response-store"
# Pictures of these tests are larger.
_EMBEDDING = '--is-embedding --mm-process-config \'{"image": {"max_pixels": 25088}}\''
_BFLOAT16 = "--dtype bfloat16"
# Triton's kernels run as Python where there is no driver for them.
_INTERPRETED = {"TRITON_INTERPRET": "1"}
# Of emulated accelerators: a tower's pass takes 0.4 s, a decode step an eighth.
DILATION = 20
_EMULATED = {
    "SGLANG_EPD_EMULATE": "h100-qwen2_5-vl-7b",
    "SGLANG_EPD_EMULATE_DILATE": str(DILATION),
}


def _backend(name: str) -> dict[str, str]:
    flag = f"--encoder-transfer-backend {name}"
    return {"encoder": flag, "language": flag, "prefill": flag}


# Of SGLang's own test of EPD: what servers have besides.
_OWN = "--trust-remote-code --tp 1 --encoder-transfer-backend zmq_to_scheduler"
_OWN_READING = (
    "--reasoning-parser qwen3 --model-loader-extra-config "
    '\'{"enable_multithread_load": true, "num_threads": 64}\''
)


def _own(model: str, *more: str, **flags: str) -> Topology:
    """Encoders, prefill and decode behind the mini-lb, but for --base-gpu-id: a CPU has none."""
    given = {
        "encoder": f"{_OWN} {flags.get('encoder', '')}",
        "prefill": f"{_OWN} {flags.get('prefill', '')}",
        "decode": "--trust-remote-code --tp 1",
    }
    return Topology(model, (*_APART, *more), flags=given)


def _long_videos(model: str) -> Topology:
    """Encoders that take a second for each three steps of a small video; one of them sends by the
    socket."""
    slow = {
        "SGLANG_EPD_EMULATE": "h100-qwen3-vl-8b",
        "SGLANG_EPD_EMULATE_DILATE": "50",
        "SGLANG_EPD_ENCODER_BATCH_PATCHES": "200",
    }
    return Topology(
        model,
        ("encoder", "encoder@inline", "language"),
        {"SGLANG_EPD_DISPATCH_POLICY": "round_robin", **_NOTHING_KEPT, **EARLY},
        {"language": "--enable-metrics"},
        {"encoder": slow, "encoder@inline": {**slow, "SGLANG_EPD_SHARED_MEMORY": "0"}},
        typed=("encoder", "encoder@inline"),  # a fork is of a process that emulates nothing
    )


def _embeddings(model: str) -> Topology:
    """As a model of embeddings. The encoder is told so, too."""
    flags = {"encoder": _EMBEDDING, "language": f"{_EMBEDDING} --enable-metrics"}
    return Topology(model, _TOGETHER, flags=flags)


TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    # In both, what one entry had encoded the other finds in the encoder's cache.
    "qwen2_5": lambda: Topology(
        _TINY,
        _FULL,
        {**_NOTHING_KEPT, **EARLY},
        {
            "language": f"--enable-metrics --enable-cache-report {_STORED}",
            "prefill": "--enable-metrics",
            "encoder": f"--enable-metrics {_CACHE}",
        },
        typed=_TOGETHER,
    ),
    "qwen3": lambda: Topology(
        "tiny-qwen3-vl", _FULL, {"SGLANG_EPD_TOKEN": TOKEN}, {"encoder": _CACHE}
    ),
    "audio": lambda: Topology("tiny-qwen2-audio", _TOGETHER, flags={"encoder": _CACHE}),
    "audio_apart": lambda: Topology("tiny-qwen2-audio", _APART),
    # One encoder serves all backends.
    "others": lambda: Topology(
        _TINY,
        (
            *("encoder", "language@zmq_to_tokenizer", "language@mooncake"),
            *("language@stages", "language@ranks"),
        ),
        flags={
            "encoder": "--encoder-transfer-backend mooncake",
            "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
            "language@mooncake": "--encoder-transfer-backend mooncake",
            "language@stages": f"{_PP2} --enable-metrics",
            "language@ranks": _TP2,
        },
        own_env={"language@stages": EARLY},
    ),
    "zmq_to_tokenizer_apart": lambda: Topology(_TINY, _APART, flags=_backend("zmq_to_tokenizer")),
    "mooncake_apart": lambda: Topology("tiny-qwen3-vl", _APART, flags=_backend("mooncake")),
    # And at two ranks.
    "ranks": lambda: Topology(
        _TINY,
        ("encoder", "language@mooncake"),
        flags={
            "encoder": "--encoder-transfer-backend mooncake",
            "language": _TP2,
            "language@mooncake": "--encoder-transfer-backend mooncake",
        },
    ),
    "replicas": lambda: Topology(
        _TINY,
        ("encoder", "language@zmq_to_tokenizer", "language@replicas"),
        flags={
            "language@zmq_to_tokenizer": f"{_TP2} --encoder-transfer-backend zmq_to_tokenizer",
            "language@replicas": "--dp-size 2",
        },
    ),
    # Data-parallel attention: two replicas, which share the layers behind it. SGLang takes
    # further ports, next to each other, for each such server.
    "attention": lambda: Topology(
        "tiny-qwen3-vl", ("encoder", "language@zmq_to_scheduler"), flags={"language": _DPA}
    ),
    "attention_tokenizer": lambda: Topology(
        "tiny-qwen3-vl", ("encoder", "language"), flags={"language": f"{_DPA} {_TO_TOKENIZER}"}
    ),
    "attention_mooncake": lambda: Topology(
        "tiny-qwen3-vl",
        ("encoder", "language@mooncake"),
        flags={
            "encoder": "--encoder-transfer-backend mooncake",
            "language": f"{_DPA} --encoder-transfer-backend mooncake",
        },
    ),
    "attention_hosts": lambda: Topology(
        "tiny-qwen3-vl",
        ("encoder", "language", "language#1"),
        flags={"language": f"{_DPA} {_TO_TOKENIZER}"},
    ),
    "attention_stages": lambda: Topology(
        "tiny-qwen3-vl",
        ("encoder", "language@stages"),
        {"SGLANG_PP_LAYER_PARTITION": "2,1"},
        {"language": f"{_DPA} {_PP2}"},
    ),
    "attention_stage_a_host": lambda: Topology(
        "tiny-qwen3-vl",
        ("encoder", "language@stages", "language@stages#1"),
        {"SGLANG_PP_LAYER_PARTITION": "2,1"},
        {"language": f"{_DPA} {_PP2}"},
    ),
    # Each of them receives.
    "workers": lambda: Topology(
        _TINY,
        ("encoder", "language@zmq_to_tokenizer"),
        flags={"language": f"--tokenizer-worker-num 2 --enable-metrics {_TO_TOKENIZER}"},
    ),
    "stages": lambda: Topology(
        _TINY,
        ("encoder", "language@zmq_to_tokenizer", "language@mooncake"),
        flags={
            "encoder": "--encoder-transfer-backend mooncake",
            "language": _PP2,
            "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
            "language@mooncake": "--encoder-transfer-backend mooncake",
        },
    ),
    # Of a family that in-tree EPD does not list. Stages that count the turns until the next prefill
    # otherwise than each other wait for each other.
    "stages_glm4v": lambda: Topology(
        "tiny-glm4v",
        ("encoder", "language@stages", "language@zmq_to_tokenizer"),
        flags={
            "language": f"{_PP2} --prefill-decode-interval 22",
            "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
        },
    ),
    # SGLang's class of it has none.
    "stages_gemma3": lambda: Topology(
        "tiny-gemma3",
        _TOGETHER,
        flags={"encoder": "--enable-multimodal", "language": f"--enable-multimodal {_PP2}"},
    ),
    # Three layers; features of the tower's lower layers are added to the first two.
    "stages_apart": lambda: Topology(
        "tiny-qwen3-vl",
        _APART,
        {"SGLANG_PP_LAYER_PARTITION": "2,1"},
        # SGLang answers otherwise behind a decode server with one stage, without encoders too.
        {"prefill": f"{_PP2} --enable-metrics", "decode": _PP2},
        {"prefill": EARLY},
    ),
    "hosts": lambda: Topology(
        _TINY,
        (
            *("encoder", "language@zmq_to_scheduler", "language@zmq_to_scheduler#1"),
            *("language@zmq_to_tokenizer", "language@zmq_to_tokenizer#1"),
        ),
        flags={
            "language": _TP2,
            "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
        },
    ),
    "stage_a_host": lambda: Topology(
        _TINY, ("encoder", "language@stages", "language@stages#1"), flags={"language": _PP2}
    ),
    "hosts_apart": lambda: Topology(
        _TINY, ("encoder", "prefill", "prefill#1", "decode", "router"), flags={"prefill": _TP2}
    ),
    "ranks_apart": lambda: Topology(_TINY, _APART, flags={"prefill": _TP2, "decode": _TP2}),
    "two_of_each": lambda: Topology(
        _TINY,
        ("encoder", "encoder@2", "prefill", "prefill@2", "decode", "router"),
        # By affinity an image has one encoder; here each has to take part.
        {"SGLANG_EPD_DISPATCH_POLICY": "round_robin", **_NOTHING_KEPT},
        # SGLang's router as it is in production.
        flags={"router": "--policy round_robin", "prefill": _NO_PREFIXES},
    ),
    "towers": lambda: Topology(
        _TINY,
        ("encoder@replicas", "encoder@ranks", "language"),
        {"SGLANG_EPD_DISPATCH_POLICY": "round_robin", **_NOTHING_KEPT},
        flags={
            "encoder@replicas": "--dp-size 2",
            "encoder@ranks": "--tp-size 2",
            "language": _NO_PREFIXES,
        },
    ),
    "embeddings": lambda: _embeddings(_TINY),
    "embeddings_others": lambda: Topology(
        _TINY,
        ("encoder", "language@zmq_to_tokenizer", "language@mooncake"),
        flags={
            "encoder": f"{_EMBEDDING} --encoder-transfer-backend mooncake",
            "language": _EMBEDDING,
            "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
            "language@mooncake": "--encoder-transfer-backend mooncake",
        },
    ),
    "embeddings_qwen2": lambda: _embeddings("tiny-qwen2-vl"),
    "embeddings_qwen3": lambda: _embeddings("tiny-qwen3-vl"),
    "adaptive": lambda: Topology(
        _TINY,
        _TOGETHER,
        {"SGLANG_ENCODER_DISPATCH_MIN_ITEMS": "3", **_NOTHING_KEPT, **EARLY},
        flags={
            "language": "--enable-adaptive-dispatch-to-encoder --enable-metrics "
            "--allowed-media-domains 127.0.0.1 --media-url-max-file-size-mb 1"
        },
        own_env={
            "encoder": {"SGLANG_ENCODER_MAX_BATCH_SIZE": "8"},
            "language": {"SGLANG_ENCODER_HTTP_TIMEOUT": "1800"},
        },
    ),
    # Forks of a process of their own: SGLang is changed while it is imported.
    "emulated": lambda: Topology(
        _TINY,
        (*_TOGETHER, "caching"),
        {**_EMULATED, **_NOTHING_KEPT},
        {"language": "--enable-metrics", "caching": "--enable-metrics"},
        forks=ForkServer(_EMULATED),
    ),
    "grpc": lambda: Topology(
        _TINY,
        ("encoder", "encoder@2", "language"),
        {
            "SGLANG_EPD_TOKEN": TOKEN,
            "SGLANG_ENCODER_MM_RECEIVER_MODE": "grpc",
            "SGLANG_EPD_ENCODER_WAIT_S": "5",
            "SGLANG_EPD_DISPATCH_POLICY": "round_robin",
            **_NOTHING_KEPT,
        },
        flags={
            "encoder": "--grpc-mode",
            "language": _NO_PREFIXES,
        },
    ),
    # SGLang's own language server asks an encoder of this package.
    "grpc_in_tree": lambda: Topology(
        _TINY,
        _TOGETHER,
        flags={
            "encoder": "--grpc-mode",
            "language": "--encoder-transfer-backend zmq_to_tokenizer",
        },
        own_env={
            "encoder": {"SGLANG_EPD_ENCODER_PUSH_NETWORKS": "127.0.0.0/8"},
            "language": {
                "SGLANG_EPD": "off",
                "SGLANG_HOST_IP": "127.0.0.1",
                "SGLANG_ENCODER_MM_RECEIVER_MODE": "grpc",
                # It would ask for /health over HTTP, and drop the encoder after three answers.
                "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL": "0",
            },
        },
    ),
    # Those of SGLang's own test of EPD.
    "own_omni": lambda: _own("tiny-qwen3-omni-moe"),
    "own_several": lambda: _own(_TINY, "encoder@2", encoder=_CACHE),
    "own_mooncake": lambda: _own(
        _TINY,
        encoder=f"{_CACHE} --encoder-transfer-backend mooncake",
        prefill="--encoder-transfer-backend mooncake",
    ),
    "own_grpc": lambda: dataclasses.replace(
        _own(_TINY, encoder=f"{_CACHE} --grpc-mode"),
        own_env={
            "encoder": {
                "SGLANG_EPD_ENCODER_PUSH_NETWORKS": "127.0.0.0/8",
                "SGLANG_EPD_MEDIA_LOCAL_ROOT": tempfile.gettempdir(),
            },
            "prefill": {"SGLANG_ENCODER_MM_RECEIVER_MODE": "grpc"},
        },
    ),
    "own_reasoning": lambda: Topology(
        "tiny-qwen3-vl", _TOGETHER, flags=dict.fromkeys(_TOGETHER, f"{_OWN} {_OWN_READING}")
    ),
    "in_tree": lambda: Topology(_TINY, _TOGETHER, {"SGLANG_EPD": "off"}),
    # Nothing is kept but in the store.
    "store": lambda: Topology(
        _TINY,
        _TOGETHER,
        _NOTHING_KEPT,
        flags={"language": f"--enable-metrics {_NO_PREFIXES}"},
    ),
    "reuse": lambda: Topology(
        _TINY,
        ("encoder", "language", "language@kv", "language@budget"),
        # All others have it.
        {"SGLANG_EPD_SHARED_MEMORY": "off"},
        {
            "language": "--enable-metrics --enable-cache-report",
            "language@kv": "--page-size 16 --chunked-prefill-size 128 --max-total-tokens 4096",
        },
        own_env={
            "language@kv": _NOTHING_KEPT,
            # Eight images of 448 px.
            "language@budget": {"SGLANG_EPD_RECEIVE_BUDGET_MB": "1"},
        },
    ),
    "reuse_missed": lambda: Topology(
        _TINY,
        ("encoder", "language@miss"),
        flags={"language": "--enable-metrics"},
        own_env={"language@miss": {"SGLANG_RADIX_FORCE_MISS": "1", **_NOTHING_KEPT}},
    ),
    # The language server encodes itself what has fewer than four pictures.
    "content": lambda: Topology(
        "tiny-qwen3-vl",
        _TOGETHER,
        {"SGLANG_ENCODER_DISPATCH_MIN_ITEMS": "4", "SGLANG_VLM_CACHE_SIZE_MB": "100"},
        {"language": "--enable-adaptive-dispatch-to-encoder --enable-cache-report"},
    ),
    # Prefixes of the cache would be computed in other batches, which rounds otherwise.
    "quantised": lambda: Topology(
        _FP8,
        _TOGETHER,
        _INTERPRETED,
        {"encoder": _BFLOAT16, "language": f"{_BFLOAT16} {_NO_PREFIXES} --enable-metrics"},
    ),
    f"{_FP8}, one server": lambda: Topology(
        _FP8, ("colocated",), _INTERPRETED, {"colocated": _BFLOAT16}
    ),
    "tiny-qwen3-vl, bfloat16, one server": lambda: Topology(
        "tiny-qwen3-vl", ("colocated",), flags={"colocated": _BFLOAT16}
    ),
    # Two servers of parts whose KV has room for little more than two prompts.
    "early": lambda: Topology(
        _TINY,
        ("encoder", "encoder@2", "language", "language@kv", "language@stages"),
        {"SGLANG_EPD_DISPATCH_POLICY": "round_robin", **_NOTHING_KEPT, **EARLY},
        {
            "language": "--enable-metrics",
            "language@kv": "--page-size 16 --max-total-tokens 512",
            "language@stages": f"{_PP2} --page-size 16 --max-total-tokens 512 --enable-metrics",
        },
    ),
    "long_videos": lambda: _long_videos("tiny-qwen3-vl"),
    "long_videos_qwen2": lambda: _long_videos("tiny-qwen2-vl"),
    # Encoders soon have too much.
    "chaos": lambda: Topology(
        _TINY,
        ("encoder", "encoder@2", "language"),
        {"SGLANG_EPD_ENCODER_MAX_ITEMS": "4", **_NOTHING_KEPT},
        {"language": _NO_PREFIXES},
    ),
    "two_encoders": lambda: Topology(
        _TINY,
        ("encoder", "registering", "language"),
        {
            "SGLANG_EPD_TOKEN": TOKEN,
            "SGLANG_EPD_ENCODER_WAIT_S": "5",
            "SGLANG_EPD_DISPATCH_POLICY": "round_robin",
            **_NOTHING_KEPT,
        },
        # All of them have to know of both encoders.
        {"language": f"--tokenizer-worker-num 2 --enable-metrics {_NO_PREFIXES}"},
    ),
}


def _family(family: Family) -> dict[str, Callable[[], Topology]]:
    """A family's servers: those of the default backend, and those of the others."""
    model = family.specs[0].name
    flags = {role: family.flags for role in (*_TOGETHER, "colocated")}
    others = ("encoder@others", "language@zmq_to_tokenizer", "language@mooncake")
    own = {
        "encoder@others": "--encoder-transfer-backend mooncake",
        "language@zmq_to_tokenizer": "--encoder-transfer-backend zmq_to_tokenizer",
        "language@mooncake": "--encoder-transfer-backend mooncake",
    }
    return {
        family.name: lambda: Topology(model, _TOGETHER, flags=flags),
        f"{family.name}, other backends": lambda: Topology(model, others, flags=flags | own),
        f"{family.name}, one server": lambda: Topology(model, ("colocated",), flags=flags),
    }


for _one in FAMILIES.values():
    TOPOLOGIES |= _family(_one)

for _model in (_TINY, "tiny-qwen2-vl", "tiny-qwen3-vl", "tiny-qwen2-audio", "tiny-glm4v"):
    TOPOLOGIES[f"{_model}, one server"] = lambda model=_model: Topology(  # type: ignore[misc]
        model, ("colocated",), flags={"colocated": _STORED}
    )

for _model in (_TINY, "tiny-qwen2-vl", "tiny-qwen3-vl"):
    TOPOLOGIES[f"{_model}, embeddings, one server"] = lambda model=_model: Topology(  # type: ignore[misc]
        model, ("colocated",), flags={"colocated": _EMBEDDING}
    )

# Those that end as they look for a driver, because a fork would be told that it is one.
_NOT_FORKED = {
    f"{family.name}, one server"
    for family in FAMILIES.values()
    if "no NVIDIA driver" in " ".join(family.stopped)
}
# What fits twice in the memory of a small machine: two processes have servers of their own.
_MOST_SERVERS = 6


class Machine:
    """Keeps one topology up, and beside it one server that does all, to compare it with.

    Args:
        folder_for: makes a folder for the logs of a topology of that name.
    """

    def __init__(self, folder_for: Callable[[str], Path]) -> None:
        self._folder_for = folder_for
        self._running: dict[str, Topology] = {}
        self._references: dict[str, Generation] = {}
        self._failures: dict[str, ServerError] = {}
        self._forks = ForkServer()
        # SGLang takes some seconds to end in order; what comes next starts meanwhile.
        self._stopper = ThreadPoolExecutor()
        self._stopping: list[Future[None]] = []

    def use(self, name: str) -> Topology:
        """The topology `name`, started if it is not up; what failed once is not tried again.

        Raises:
            ServerError: one of its servers does not start.
        """
        if name in self._failures:
            raise ServerError(str(self._failures[name]))
        if name not in self._running:
            topology = TOPOLOGIES[name]()
            topology.forks = None if name in _NOT_FORKED else topology.forks or self._forks
            self._make_room(topology)
            self._running[name] = topology
            try:
                topology.start(self._folder_for(name))
            except ServerError as error:
                self._failures[name] = error
                self._end(self._running.pop(name))
                raise
        return self._running[name]

    @contextlib.contextmanager
    def lend(self, topology: Topology) -> Iterator[Topology]:
        """A topology that ends with its user, for what only that one knows of its servers.

        Raises:
            ServerError: one of its servers does not start.
        """
        topology.forks = topology.forks or self._forks
        self._make_room(topology)
        try:
            topology.start(self._folder_for("lent"))
            yield topology
        finally:
            topology.stop()

    def colocated(self, name: str) -> Client:
        """One server of a checkpoint, or a family, that does everything itself.

        Raises:
            ServerError: it does not start.
        """
        return Client(self.use(f"{name}, one server").urls["colocated"])

    def reference(
        self, model: str, messages: list[dict[str, Any]], tokens: int, at: str | None = None
    ) -> Generation:
        """What one colocated server of the checkpoint, or of the family `at`, answers; asked
        once in a session."""
        key = json.dumps([model, messages, tokens])
        if key not in self._references:
            server = self.colocated(at or model)
            self._references[key] = server.generation(*messages, tokens=tokens)
        return self._references[key]

    def check(
        self,
        client: Client,
        model: str,
        messages: list[dict[str, Any]],
        tokens: int = 16,
        at: str | None = None,
    ) -> None:
        """A server's answer is that of one colocated server (`reference`)."""
        expected = self.reference(model, messages, tokens, at)
        client.generation(*messages, tokens=tokens).check(expected)

    def _make_room(self, topology: Topology) -> None:
        """End what is of the new one's kind, and all if there would be too many servers."""
        for name, running in list(self._running.items()):
            together = len(running.roles) + len(topology.roles)
            if running.one_server == topology.one_server or together > _MOST_SERVERS:
                del self._running[name]
                self._stopping.append(self._stopper.submit(self._end, running))

    def _end(self, topology: Topology) -> None:
        topology.stop()
        if topology.forks is not None and topology.forks is not self._forks:
            topology.forks.close()

    def clear(self) -> None:
        """End everything; what comes next starts anew.

        Raises:
            OSError, ServerError: some servers could not be stopped.
        """
        for topology in self._running.values():
            self._end(topology)
        self._running.clear()
        stopping, self._stopping = self._stopping, []
        wait(stopping)
        self._forks.close()
        for stopped in stopping:
            stopped.result()
