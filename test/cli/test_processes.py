"""ServerProcess against real child processes: small HTTP servers, not SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sglang_epd.cli.processes import ServerError, ServerProcess, free_port, stop_all
from waiting import reached

# A server whose child sleeps for ever; both ignore SIGTERM when told to.
SERVER = """
import http.server, os, signal, subprocess, sys
port, stubborn = int(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
http.server.ThreadingHTTPServer(
    ("127.0.0.1", port), http.server.SimpleHTTPRequestHandler
).serve_forever()
"""


def serve(tmp_path: Path, manner: str = "polite", code: str = SERVER) -> ServerProcess:
    port = free_port()
    return ServerProcess(
        "files",
        [sys.executable, "-c", code, str(port), manner],
        log_path=tmp_path / "logs" / "files.log",
        ready_url=f"http://127.0.0.1:{port}/",
    )


def child_of(server: ServerProcess) -> int:
    return int(server.tail().split("child ")[1].split()[0])


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_ready_then_stopped_with_its_children(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert 0 < server.wait_ready(30) < 30
        assert server.running
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
        pid, child = server.pid, child_of(server)
        assert runs(child)
    assert not server.running
    assert not runs(pid)
    assert not runs(child)
    server.stop()  # a second time does nothing


def test_sigterm_ignored_becomes_sigkill(tmp_path: Path) -> None:
    with serve(tmp_path, "stubborn") as server:
        server.wait_ready(30)
        child = child_of(server)
        begin = time.monotonic()
        server.stop(grace_s=0.5)
        assert 0.5 <= time.monotonic() - begin < 5
        assert not runs(server.pid)
        assert not runs(child)


def test_early_death_shows_the_log(tmp_path: Path) -> None:
    code = "print('line one'); raise SystemExit('no such model')"
    failure = pytest.raises(ServerError, match="exited with status 1")
    with serve(tmp_path, code=code) as server, failure as caught:
        server.wait_ready(30)
    assert "line one" in str(caught.value)
    assert "no such model" in str(caught.value)


def test_orphans_of_a_crash_are_killed(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        server.wait_ready(30)
        child = child_of(server)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="killed by signal 9"):
            server.wait_ready(30)
        assert runs(child)
    assert not runs(child)


def test_not_ready_in_time(tmp_path: Path) -> None:
    with serve(
        tmp_path, code="import time; print('loading', flush=True); time.sleep(60)"
    ) as server:
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_ready(1)
        assert server.running


def test_several_stop_at_the_same_time(tmp_path: Path) -> None:
    stop_all([])
    servers = [serve(tmp_path / str(n), "stubborn") for n in range(3)]
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready(30)
    begin = time.monotonic()
    stop_all(servers, grace_s=3.0)
    assert time.monotonic() - begin < 8.9
    assert not any(server.running for server in servers)


def test_kill_and_start_again(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        server.wait_ready(30)
        first, child = server.pid, child_of(server)
        with pytest.raises(ServerError, match="running already"):
            server.start()
        server.kill()
        assert not runs(first)
        assert not runs(child)
        server.start()
        assert server.pid != first


def test_command_that_cannot_be_run(tmp_path: Path) -> None:
    server = ServerProcess(
        "nothing",
        ["/no/such/program"],
        log_path=tmp_path / "nothing.log",
        ready_url=f"http://127.0.0.1:{free_port()}/",
    )
    with pytest.raises(ServerError, match="was not started"):
        server.wait_ready(1)
    with server, pytest.raises(ServerError, match="cannot run /no/such/program"):
        server.wait_ready(30)


def test_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent_code = textwrap.dedent(
        """
        import pathlib, sys, time
        from sglang_epd.cli.processes import ServerProcess
        server = ServerProcess(
            "sleeper", [sys.executable, "-c", "import time; time.sleep(600)"],
            log_path=pathlib.Path(sys.argv[1]), ready_url="http://127.0.0.1:9/",
        )
        server.start()
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "log")], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.5)  # past the exec that follows the request for the signal
        assert runs(pid)
        parent.kill()
    reached(lambda: not runs(pid))


def test_free_ports_are_not_given_twice_and_not_those_of_outgoing_connections() -> None:
    with socket.socket() as taken:
        first = free_port()
        taken.bind(("127.0.0.1", first + 1))
        ports = [first, *(free_port() for _ in range(50))]
    assert len(set(ports)) == len(ports)
    assert first + 1 not in ports
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < low
