"""A process that has imported SGLang, and becomes its servers by forking.

Importing SGLang takes each of a server's three processes a dozen processor seconds, which
is most of what starting a server takes. This process does it once. A request names the
arguments, the environment and the log of a server; the fork runs `sglang.launch_server` as
`__main__` in its own session, and dies with this process.

What a server spawns is forked, too: the server's first act is to fork a process that stays
as it is, and that forks what Python's `spawn` would have started (Python's own fork server,
but one that imports nothing anew). These processes take the server's environment of that
moment. They are its grandchildren; the one between passes a signal of theirs on.

Run by `forked.py`, with the descriptor of a socket as the one argument: lines of JSON,
requests in one direction, process ids and wait statuses in the other.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

import setproctitle

SERVER = "sglang.launch_server"
# What each server imports, all model classes among them.
_IMPORTED = (
    SERVER,
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.disaggregation.encoder.http_server",
    "sglang.srt.models.registry",
)
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = "environment"
# An encoder with this variable has a tower that fails from when the file of that name is there.
BREAKS = "TEST_BREAKS_TOWER"


def main(number: int) -> None:
    """Answer requests until their sender is gone; returns in the fork, as a server."""
    # `multiprocessing.get_context("spawn")` is asked for at some imports.
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]
    given = set(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    # As in a server that imports them itself.
    set_meanwhile = {name: os.environ[name] for name in os.environ.keys() - given}
    # SGLang names its processes; where a name is written is found by the first environment.
    setproctitle.getproctitle()
    # What is there by now is shared by all, as long as no collector writes to it.
    gc.collect()
    gc.freeze()
    request = _forked(socket.socket(fileno=number))
    if request is not None:
        _serve({**request, "env": {**set_meanwhile, **request["env"]}})


def _forked(control: socket.socket) -> dict[str, Any] | None:
    """Fork on request; the request in the fork, None once the sender is gone."""
    parent = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    lines = control.makefile("rb")
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _send(control, {"pid": key.data, "status": status})
                continue
            # One request at a time: the sender waits for the process id.
            line = lines.readline()
            if not line:
                return None
            pid = os.fork()
            if pid == 0:
                _die_with(parent)
                # Not the descriptor: it is shared with the parent.
                selector.close()
                lines.close()
                control.close()
                return dict(json.loads(line))
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            _send(control, {"pid": pid})


def _send(control: socket.socket, answer: dict[str, int]) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(request: dict[str, Any]) -> None:
    """Be the server that was asked for."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    _take_environment(request["env"])
    sys.argv = [SERVER, *request["arguments"]]
    sys.path[0] = os.getcwd()
    _fork_what_is_spawned()
    if BREAKS in os.environ:
        waiting = threading.Thread(target=_break_tower, args=[Path(os.environ[BREAKS])])
        waiting.daemon = True
        waiting.start()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def _break_tower(told: Path) -> None:
    """As after a device error that every later call fails with."""
    while not told.exists():
        time.sleep(0.01)
    engine = importlib.import_module("sglang_epd.encoder.model.engine")
    (tower,) = [one for one in gc.get_objects() if type(one) is engine.Engine]

    def fail(_module: Any, _inputs: Any) -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for module in tower._encoder.model.modules():
        module.register_forward_pre_hook(fail)


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _fork_what_is_spawned() -> None:
    """Have `multiprocessing`'s fork server be a fork of this process as it is now."""
    server: Any = multiprocessing.forkserver._forkserver
    listener = socket.socket(socket.AF_UNIX)
    # Abstract: no file of it stays.
    listener.bind(f"\0{tempfile.gettempdir()}/sglang-epd-test-{os.getpid()}")
    listener.listen()
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        _die_with(parent)
        _pass_on(signal.SIGQUIT)
        _wrap_preparation()
        multiprocessing.forkserver.main(listener.detach(), reading, [])
        os._exit(0)
    os.close(reading)
    server._forkserver_address = listener.getsockname()
    server._forkserver_alive_fd = writing
    server._forkserver_pid = pid
    listener.close()
    prepared = spawn.get_preparation_data

    def with_environment(name: str) -> dict[str, Any]:
        return {**prepared(name), _ENVIRONMENT: dict(os.environ)}

    spawn.get_preparation_data = with_environment


def _pass_on(number: signal.Signals) -> None:
    """SGLang's processes tell their parent when they fail; that is the server."""
    signal.signal(number, lambda *_: os.kill(os.getppid(), number))
    os.register_at_fork(after_in_child=lambda: signal.signal(number, signal.SIG_DFL))


def _wrap_preparation() -> None:
    prepare = spawn.prepare

    def with_environment(data: Mapping[str, Any]) -> None:
        _take_environment(data[_ENVIRONMENT])
        prepare({name: value for name, value in data.items() if name != _ENVIRONMENT})

    spawn.prepare = with_environment


if __name__ == "__main__":
    main(int(sys.argv[1]))
