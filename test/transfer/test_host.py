from __future__ import annotations

import os
import resource
import signal

import pytest

from forking import fork
from sglang_epd.transfer import host


def test_a_process_lives_until_it_is_gone(another_process):
    name, child = another_process
    assert name != host.this_process()
    assert host.shares_memory(name)
    assert host.lives(name)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert host.lives(name), "a stopped process may go on"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not host.lives(name), "what is only not yet waited for does not run"
    child.wait()
    assert not host.lives(name)


def test_this_process_lives_and_shares_its_memory():
    name = host.this_process()
    assert host.shares_memory(name)
    assert host.lives(name)


def test_a_later_process_of_the_same_number_is_another():
    machine, pid, started = host.this_process().rsplit("/", 2)
    assert not host.lives(f"{machine}/{pid}/{int(started) + 1}")


def test_the_name_of_a_program_does_not_confuse(monkeypatch, tmp_path):
    stat = tmp_path / "7" / "stat"
    stat.parent.mkdir()
    stat.write_text("7 (a) Z (b) S 1 " + " ".join("0" for _ in range(17)) + " 1234 0 0\n")
    monkeypatch.setattr(host, "_PROC", tmp_path)
    assert host.lives("machine/7/1234")
    stat.write_text(stat.read_text().replace(") S ", ") Z "))
    assert not host.lives("machine/7/1234")


@pytest.mark.parametrize("other", ["", "elsewhere/1/1", "/", "x" * 10_000])
def test_processes_of_other_machines_share_nothing(other):
    assert not host.shares_memory(other)


@pytest.mark.parametrize(
    "nonsense", ["", "x", "machine/pid/started", "machine/-1/1", "machine/1/", "m/1/\0", "m/../1"]
)
def test_what_names_no_process_does_not_live(nonsense):
    assert not host.lives(nonsense)


def test_where_the_system_does_not_tell_nothing_is_shared(monkeypatch, tmp_path):
    name = host.this_process()
    monkeypatch.setattr(host, "_PROC", tmp_path)
    host._machine.cache_clear()
    try:
        assert host.this_process() == ""
        assert not host.shares_memory(name)
        assert not host.lives(name)
    finally:
        monkeypatch.undo()
        host._machine.cache_clear()


def test_a_process_that_cannot_be_seen_now_may_live(another_process):
    name, _ = another_process

    def see() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        os._exit(0 if host.lives(name) else 1)

    child = fork(see)
    child.join()
    assert child.exitcode == 0
