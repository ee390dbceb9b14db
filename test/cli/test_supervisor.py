"""The supervisor against real child processes: small HTTP servers, not SGLang."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cli.conftest import SERVER, server
from sglang_epd.cli import logs
from sglang_epd.cli.lives import Restarts
from sglang_epd.cli.processes import ServerError
from sglang_epd.cli.supervisor import Supervisor
from sglang_epd.cli.topology import Fleet, Server

DIES = "import sys; print('no such model', flush=True); sys.exit(3)"
# Serves once, and in its next life only dies.
ONCE = (
    """
import os, sys
if os.path.exists(sys.argv[2]): sys.exit("cannot any more")
open(sys.argv[2], "w").close()
"""
    + SERVER
)
TELLS = "import os; print('life', os.getpid(), flush=True)\n" + SERVER
QUICK = Restarts(most=2, first_s=0.05, longest_s=0.1)


class Recorder:
    """Keeps what is reported; `act` is called with each piece of news."""

    def __init__(self, act: Callable[[str, str], None] = lambda name, text: None) -> None:
        self.told: list[tuple[str, str]] = []
        self.lines: list[tuple[str, str]] = []
        self.waits: list[dict[str, str]] = []
        self.when_ready: Callable[[], None] = interrupt
        self._act = act

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def news(self, name: str, text: str) -> None:
        self.told.append((name, text))
        self._act(name, text)

    def tick(self, waiting: Mapping[str, str]) -> None:
        self.waits.append(dict(waiting))


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def supervise(folder: Path, recorder: Recorder, *servers: Server, **options) -> Supervisor:
    plan = Fleet(servers, servers[-1].url)
    defaults = {"env": os.environ, "restarts": QUICK, "start_timeout_s": 20}
    told = {"changed": lambda: None, "ready": lambda: recorder.when_ready()}  # noqa: PLW0108 - set later
    return Supervisor(plan, folder, recorder, **{**defaults, **told, **options})


def alive(supervisor: Supervisor) -> list[str]:
    return [told["name"] for told in supervisor.describe() if told["pid"] is not None]


def test_up_then_down_again(tmp_path):
    recorder = Recorder()
    supervisor = supervise(
        tmp_path,
        recorder,
        server("encoder", "encoder"),
        server("language", "language"),
        server("router", "router", needs=("language",)),
    )
    seen = []

    def look() -> None:
        seen.extend(supervisor.describe())
        interrupt()

    recorder.when_ready = look
    before = signal.getsignal(signal.SIGINT)
    supervisor.run()
    assert {told["name"]: told["state"] for told in seen} == dict.fromkeys(
        ("encoder", "language", "router"), "ready"
    )
    assert {told["state"] for told in supervisor.describe()} == {"stopped"}
    assert not alive(supervisor)
    news = [name for name, text in recorder.told if text.startswith(("started", "ready"))]
    # After the language server's start, and its being ready; the encoder may be ready later.
    assert news[: news.index("router")].count("language") == 2
    assert ("encoder", "Uvicorn running") in recorder.lines
    assert recorder.waits[-1] == {}
    assert signal.getsignal(signal.SIGINT) is before


def test_told_to_stop_while_servers_start(tmp_path):
    recorder = Recorder(lambda name, text: interrupt())
    sleeper = "import time; time.sleep(600)"
    supervisor = supervise(
        tmp_path,
        recorder,
        server("encoder", "encoder", sleeper),
        server("router", "router", needs=("encoder",)),
    )
    supervisor.run()
    assert not alive(supervisor)
    assert {told["state"] for told in supervisor.describe()} == {"stopped"}
    assert all(name != "router" for name, _text in recorder.told)


def test_what_is_killed_is_started_again(tmp_path):
    supervisor: Supervisor

    def act(name: str, text: str) -> None:
        if text.startswith("ready") and supervisor.describe()[0]["restarts"]:
            interrupt()

    recorder = Recorder(act)
    changes: list[str] = []
    supervisor = supervise(
        tmp_path,
        recorder,
        server("encoder", "encoder", TELLS),
        server("language", "language"),
        changed=lambda: changes.append(supervisor.describe()[0]["state"]),
    )
    recorder.when_ready = lambda: kill_first(supervisor)
    supervisor.run()
    told = [text for name, text in recorder.told if name == "encoder"]
    assert any("killed by signal 9; starts again" in text for text in told)
    assert any(text.startswith("restart 1, pid") for text in told)
    assert changes[:1] == ["starting"]
    assert {"down", "ready"} <= set(changes)
    assert supervisor.describe()[0]["restarts"] == 1
    assert (tmp_path / "encoder.log.previous").exists()
    lives = [text for _name, text in recorder.lines if text.startswith("life ")]
    assert len(lives) == len({*lives}) == 2, "each is shown, and once"
    assert not alive(supervisor)


def test_what_is_started_again_waits_for_none_that_was_given_up(tmp_path):
    """A router would be down for good, though another server of the role answers."""
    supervisor: Supervisor

    def kill(name: str) -> None:
        (pid,) = [told["pid"] for told in supervisor.describe() if told["name"] == name]
        os.kill(pid, signal.SIGKILL)

    def act(name: str, text: str) -> None:
        if name == "language-1" and text.startswith("restart"):
            kill(name)
        elif name == "language-1" and text.endswith("given up"):
            kill("router")
        elif name == "router" and text.startswith("restart"):
            interrupt()

    recorder = Recorder(act)
    both = ("language-0", "language-1")
    supervisor = supervise(
        tmp_path,
        recorder,
        *(server(name, "language") for name in both),
        server("router", "router", needs=both),
    )
    recorder.when_ready = lambda: kill("language-1")
    until = time.monotonic() + 30.0
    recorder.tick = lambda _waiting: time.monotonic() > until and interrupt()
    supervisor.run()
    assert supervisor.describe()[-1]["restarts"] == 1, "the router's"


def test_logs_of_servers_that_talk_for_days_do_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MAX_LOG_BYTES", 1000)
    chatty = """
import itertools, time
for number in itertools.count():
    print(number, flush=True)
    time.sleep(1e-3)
"""
    log, recorder = tmp_path / "encoder.log", Recorder()
    recorder.tick = lambda _waiting: logs.earlier(log).exists() and interrupt()
    supervise(tmp_path, recorder, server("encoder", "encoder", chatty)).run()
    last = int(logs.earlier(log).read_text().split()[-1])
    went_on = [int(line) for line in log.read_text().split()]
    assert all(number > last for number in went_on), "at its end, not where it had been"


def kill_first(supervisor: Supervisor) -> None:
    os.kill(supervisor.describe()[0]["pid"], signal.SIGKILL)


def test_what_cannot_be_started_again_at_once_is_later(tmp_path):
    supervisor: Supervisor
    in_the_way = tmp_path / "encoder.log.previous"

    def act(_name: str, text: str) -> None:
        if "by signal 9" in text:
            in_the_way.mkdir()
        if "cannot be started" in text:
            in_the_way.rmdir()
        if text.startswith("ready") and supervisor.describe()[0]["restarts"]:
            interrupt()

    recorder = Recorder(act)
    supervisor = supervise(
        tmp_path, recorder, server("encoder", "encoder"), server("language", "language")
    )
    recorder.when_ready = lambda: kill_first(supervisor)
    supervisor.run()
    told = [text for name, text in recorder.told if name == "encoder"]
    assert any("cannot be started ([Errno 21]" in text and "starts again" in text for text in told)
    assert supervisor.describe()[0]["restarts"] == 2


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = Recorder()
    supervise(tmp_path, recorder, server("encoder", "encoder"), changed=full).run()
    assert ("encoder", "`status` does not show this: [Errno 28] No space left on device") in (
        recorder.told
    )
    assert any(text.startswith("ready") for _, text in recorder.told)


def test_one_that_never_starts_ends_all_and_says_why(tmp_path):
    servers = [server("encoder-0", "encoder", DIES), server("encoder-1", "encoder")]
    supervisor = supervise(tmp_path, Recorder(), *servers, server("language", "language"))
    with pytest.raises(ServerError, match="no such model"):
        supervisor.run()
    assert not alive(supervisor)


@pytest.mark.parametrize("others", [0, 1])
def test_one_that_cannot_come_back_ends_all_if_it_was_the_last_of_its_role(tmp_path, others):
    def act(_name: str, text: str) -> None:
        if others and "given up" in text:
            interrupt()

    recorder = Recorder(act)
    supervisor = supervise(
        tmp_path,
        recorder,
        server("encoder-0", "encoder", ONCE, str(tmp_path / "been")),
        *(server(f"encoder-{number + 1}", "encoder") for number in range(others)),
        server("language", "language"),
    )
    recorder.when_ready = lambda: kill_first(supervisor)
    if others:
        supervisor.run()
    else:
        with pytest.raises(ServerError, match="cannot any more"):
            supervisor.run()
    assert len([text for _, text in recorder.told if "given up" in text]) == 1
    assert supervisor.describe()[0]["restarts"] == QUICK.most
    assert not alive(supervisor)


def test_who_is_not_ready_in_time_is_named_with_its_phase(tmp_path):
    supervisor = supervise(
        tmp_path,
        Recorder(),
        server(
            "encoder",
            "encoder",
            "import time; print('Load weight begin', flush=True); time.sleep(60)",
        ),
        start_timeout_s=5,
    )
    with pytest.raises(ServerError, match=r"--timeout\): encoder \(loading weights\)"):
        supervisor.run()
    assert not alive(supervisor)


def test_everything_is_stopped_even_if_nobody_can_be_told(tmp_path):
    class Mute(Recorder):
        def line(self, name: str, text: str) -> None:
            raise UnicodeEncodeError("ascii", text, 0, 1, "no such character")

    servers = [server("encoder", "encoder"), server("router", "router")]
    supervisor = supervise(tmp_path, Mute(), *servers)
    with pytest.raises(UnicodeEncodeError):
        supervisor.run()
    assert not alive(supervisor)


def test_under_nohup_it_outlives_its_terminal(tmp_path):
    recorder = Recorder()

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    recorder.when_ready = leave
    supervisor = supervise(tmp_path, recorder, server("encoder", "encoder"))
    told = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ended = signal.signal(signal.SIGALRM, lambda *_: (told.append(alive(supervisor)), interrupt()))
    try:
        supervisor.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGALRM, ended)
    assert told == [["encoder"]]


def test_a_terminal_that_closes_is_one_signal(tmp_path):
    """Its shell sends it, and so does the kernel, a moment later."""
    drains = """
import signal, sys, time
def drain(*_):
    time.sleep(1)
    open(sys.argv[2], "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, drain)
"""
    recorder = Recorder()

    later = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))

    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        later.start()

    # These tests may be run under nohup, and the second one may come late.
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    recorder.when_ready = hang_up
    drained = tmp_path / "drained"
    encoder = server("encoder", "encoder", drains + SERVER, str(drained))
    try:
        supervise(tmp_path, recorder, encoder).run()
    finally:
        later.join()
        signal.signal(signal.SIGHUP, before)
    assert drained.exists()


def test_a_second_signal_ends_what_does_not_end_by_itself(tmp_path):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    recorder = Recorder()

    def twice() -> None:
        interrupt()
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    recorder.when_ready = twice
    supervisor = supervise(tmp_path, recorder, server("encoder", "encoder", stubborn), grace_s=60)
    begin = time.monotonic()
    try:
        supervisor.run()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 20
    assert not alive(supervisor)
