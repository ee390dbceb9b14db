"""The real servers behind shared stores, each as a child process that may be killed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packages import folder_of
from sglang_epd.cli.processes import free_port

_READY_S = 30.0
# Gives memory to a Mooncake Store for as long as its stdin is open.
_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 0, "tcp", "", sys.argv[2])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
store.close()
"""


class Server:
    """A server on a port of this machine."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.port = port
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + _READY_S
        while True:
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < end, self._log.read_text()[-2000:]
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[Server]:
    server = Server(command, port, log)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def mooncake_master(folder: Path, *flags: str) -> Iterator[Server]:
    """A Mooncake master; nothing can be stored before there is a node."""
    port, metrics = free_port(), free_port()
    command = [str(folder_of("mooncake") / "mooncake_master")]
    command += ["--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}", *flags]
    with _running(command, port, folder / "master.log") as server:
        yield server


@contextmanager
def mooncake_node(folder: Path, master: Server, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """A node that gives a Mooncake Store so much memory."""
    command = [sys.executable, "-c", _NODE, str(nbytes), f"127.0.0.1:{master.port}"]
    with (folder / "node.log").open("ab") as log:
        node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert node.stdout is not None
        assert node.stdout.readline().strip() == "ready", (folder / "node.log").read_text()[-2000:]
        yield node
    finally:
        node.kill()
        node.wait()
        for pipe in (node.stdin, node.stdout):
            if pipe is not None:
                pipe.close()
