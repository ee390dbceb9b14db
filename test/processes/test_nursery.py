from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.processes import nursery as nursery_module
from sglang_epd.processes.nursery import Child, Nursery
from waiting import reached

HERE = Path(__file__).parent
BIRTH_S = 2.0


@pytest.fixture
def nursery(monkeypatch) -> Iterator[Nursery]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    nursery = Nursery(["json.tool"], birth_s=BIRTH_S)
    bear, born = nursery.child, []

    def child(*args: Any, **options: Any) -> Child:
        born.append(bear(*args, **options))
        return born[-1]

    monkeypatch.setattr(nursery, "child", child)
    yield nursery
    nursery.close()
    for one in born:
        one.close()


def echo(nursery: Nursery, name: str = "a") -> Child:
    return nursery.child("births:echo", {"name": name})


def ask(child: Child, word: bytes) -> bytes:
    child.end.settimeout(30)
    child.end.send(word)
    return child.end.recv(1 << 16)


def test_a_child_that_speaks_at_once_is_heard_after_its_birth(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    nursery = Nursery(["late_births"])
    try:
        child = nursery.child("births:speak")
        child.end.settimeout(30)
        assert child.end.recv(100) == b"first"
        child.close()
    finally:
        nursery.close()


def test_children_are_apart_and_begin_at_once(nursery):
    first = echo(nursery)
    began = time.monotonic()
    second = echo(nursery, "b")
    assert time.monotonic() - began < BIRTH_S
    assert ask(first, b"x") == b"a 0 x"
    assert ask(first, b"y") == b"a 1 y"
    assert ask(second, b"z") == b"b 0 z"
    assert len({os.getpid(), nursery.pid, first.pid, second.pid}) == 4


def test_a_child_holds_its_own_end_only(nursery):
    for _ in range(3):
        echo(nursery)
    for options, yields in (({}, 10), ({"nice": 0}, 0)):
        child = nursery.child("births:describe", **options)
        held, end, nice, imported = ast.literal_eval(child.end.recv(1 << 16).decode())
        assert held == [0, 1, 2, end]
        assert nice == min(19, os.nice(0) + yields)
        assert imported


def test_a_child_whose_user_lets_go_ends(nursery):
    child = echo(nursery)
    child.end.shutdown(2)
    assert child.ended(30)


def test_a_child_that_fails_is_seen_by_the_end_of_its_channel(nursery, capfd):
    child = nursery.child("births:fail")
    assert child.end.recv(1) == b""
    assert "a child's own failure" in capfd.readouterr().err
    assert ask(echo(nursery), b"x") == b"a 0 x"


@pytest.mark.parametrize("stop", [None, signal.SIGSTOP])
def test_a_child_can_be_killed_from_any_thread(nursery, stop):
    child, other = nursery.child("births:sleep"), echo(nursery)
    if stop is not None:
        os.kill(child.pid, stop)
    thread = threading.Thread(target=child.kill)
    thread.start()
    thread.join()
    assert child.end.recv(1) == b""
    assert child.ended(30)
    child.kill()  # once more harms nobody
    assert ask(other, b"x") == b"a 0 x"


def test_children_that_ended_are_reaped(nursery):
    children = [echo(nursery) for _ in range(5)]
    assert nursery.pid is not None
    for child in children:
        child.kill()
    reached(lambda: not psutil.Process(nursery.pid).children(), 30)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_nursery_that_is_struck_comes_back_at_the_next_need(nursery, blow):
    child = echo(nursery)
    before = nursery.pid
    os.kill(before, blow)
    if blow == signal.SIGKILL:
        assert child.ended(30)  # no child outlives the process that forked it
    assert ask(echo(nursery, "new"), b"x") == b"new 0 x"
    assert nursery.pid != before
    assert child.ended(30)


def test_a_nursery_whose_end_is_noticed_late_is_no_machine_without_processes(nursery):
    class Late(threading.Event):
        def set(self):
            threading.Timer(0.3, super().set).start()

    child = echo(nursery)
    nursery._forker._dead = Late()
    os.kill(nursery.pid, signal.SIGKILL)
    assert child.ended(30)
    assert ask(echo(nursery, "new"), b"x") == b"new 0 x"


def test_a_nursery_that_does_not_end_is_said_and_not_waited_for(nursery, monkeypatch, caplog):
    echo(nursery)
    before = nursery.pid
    os.kill(before, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr("sglang_epd.processes.nursery._END_S", 0.1)
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as if it were held
        with pytest.raises(UnavailableError, match="cannot be started"):
            echo(nursery)
    assert f"pid {before}) does not end" in caplog.text
    assert ask(echo(nursery, "new"), b"x") == b"new 0 x"


def test_a_nursery_lives_beyond_the_thread_that_started_it(nursery):
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(echo(nursery)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert ask(children[0], b"x") == b"a 0 x"


def test_closing_ends_all_of_it(nursery):
    child = echo(nursery)
    nursery.close()
    assert child.ended(30)
    assert nursery.pid is None
    with pytest.raises(UnavailableError, match="closed"):
        echo(nursery)


def test_a_process_that_cannot_begin_is_an_error(monkeypatch):
    nursery = Nursery(["no_such_module"])
    with pytest.raises(UnavailableError, match="cannot be started"):
        echo(nursery)
    nursery.close()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    nursery = Nursery()
    with pytest.raises(UnavailableError, match="cannot be started"):
        nursery.start()


def test_a_process_without_descriptors_is_an_error_and_no_wait(monkeypatch):
    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    nursery = Nursery()
    before = psutil.Process().children()
    with monkeypatch.context() as full:
        full.setattr(os, "pidfd_open", none_left)
        with pytest.raises(UnavailableError, match="cannot be started: Too many open files"):
            nursery.start()
    assert psutil.Process().children() == before
    child = echo(nursery)
    child.close()
    nursery.close()


def test_a_child_whose_descriptor_does_not_arrive_is_the_servers_fault(nursery, monkeypatch):
    received = nursery_module.receive_now
    answers = []

    def cut_short(*asked: Any) -> Any:
        message, fds = received(*asked)
        os.close(fds[0])
        answers.append(message.pid)
        raise ProtocolError("a packet was cut short")

    monkeypatch.setattr(nursery_module, "receive_now", cut_short)
    with pytest.raises(UnavailableError, match="cannot be started"):
        echo(nursery)
    (pid,) = answers
    reached(lambda: not psutil.pid_exists(pid), 30, why="nobody is at its other end")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_all_dies_with_the_server_and_by_nothing_that_its_group_is_told(blow):
    """A server that answers SIGTERM and SIGINT itself still has its children meanwhile."""
    script = textwrap.dedent("""
        import signal, time
        from sglang_epd.processes.nursery import Nursery
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        nursery = Nursery()
        child = nursery.child("births:sleep")
        print(nursery.pid, child.pid, flush=True)
        while True:
            time.sleep(1)
    """)
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    server = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert server.stdout is not None
    family = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
    os.killpg(server.pid, blow) if blow != signal.SIGKILL else server.kill()
    if blow != signal.SIGKILL:
        time.sleep(0.5)
        assert all(process.is_running() for process in family)
        server.kill()
    server.wait()
    server.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert len(gone) == 2
    assert not alive
