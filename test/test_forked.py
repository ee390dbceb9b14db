"""Waiting for a fork; that forks are servers the tests on servers show."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration import fork_server
from integration.forked import Fork, ForkServer
from sglang_epd.cli.processes import ServerError

# Answers one request with an id and what else it is to say, and ends.
_STAND_IN = """
import socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
control.makefile("rb").readline()
control.sendall(ANSWERS)
"""


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fork]]:
    parent = ForkServer()

    def begin(*answers: dict[str, int]) -> Fork:
        lines = "".join(json.dumps(answer) + "\n" for answer in ({"pid": 7}, *answers))
        program = tmp_path / "stand_in.py"
        program.write_text(_STAND_IN.replace("ANSWERS", repr(lines.encode())))
        monkeypatch.setattr(fork_server, "__file__", str(program))
        return parent.fork([], {}, tmp_path / "log")

    yield begin
    parent.close()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (9, -9)])
def test_how_a_fork_ended_is_told(fork: Callable[..., Fork], status: int, code: int) -> None:
    ended = fork({"pid": 7, "status": status})
    assert ended.wait(5) == code
    assert ended.poll() == code


def test_what_it_was_a_fork_of_has_ended(fork: Callable[..., Fork]) -> None:
    lost = fork()
    with pytest.raises(ServerError, match="has ended"):
        lost.wait(5)


def test_a_server_is_a_fork_whichever_test_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "one")
    command, env = [sys.executable, "-m", fork_server.SERVER], dict(os.environ)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert ForkServer().can_be(command, env)
    assert not ForkServer({"HF_HOME": "elsewhere"}).can_be(command, env)
