from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_epd.errors import ConfigError, UnavailableError
from sglang_epd.transfer.mooncake import MooncakeEngine
from waiting import reached

PATIENCE_S = 5.0
KIB = 1 << 10
MIB = 1 << 20
NBYTES = 4 * MIB


class Buffer:
    """Memory at a known address, anonymous or shared through a file descriptor."""

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        self.memory = mmap.mmap(fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def started() -> MooncakeEngine:
    """Mooncake over TCP, started as SGLang does."""
    from mooncake.engine import TransferEngine

    raw = TransferEngine()
    assert raw.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return MooncakeEngine("127.0.0.1", raw)


def receive() -> None:
    """The receiver process: registers a buffer, then does what its stdin says."""
    engine = started()
    fd = os.memfd_create("receiver")
    os.ftruncate(fd, NBYTES)
    buffer = Buffer(NBYTES, fd)
    engine.register(buffer.address, NBYTES)
    print(engine.session, buffer.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["read", start, stop]:
                # Through the descriptor, as another process that has it would.
                print(os.pread(fd, int(stop) - int(start), int(start)).hex(), flush=True)
            case ["register"]:
                engine.register(buffer.address, NBYTES)
                print("done", flush=True)
            case ["unregister"]:
                assert engine._engine.unregister_memory(buffer.address) == 0
                print("done", flush=True)


class Peer:
    """A receiver process as a test sees it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transfer.test_mooncake"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.session, address = self.process.stdout.readline().split()
        self.address = int(address)

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def read(self, start: int, stop: int) -> bytes:
        return bytes.fromhex(self.tell(f"read {start} {stop}"))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Fewer lines on stderr; what the module sets is undone after its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_LOG_LEVEL", "ERROR")
        patch.setenv("MC_FORCE_TCP", "1")
        yield


@pytest.fixture(scope="module")
def engine(quiet: None) -> MooncakeEngine:
    """One for all tests here: ending an engine takes a second."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    return started()


@pytest.fixture(scope="module")
def receiver(engine: MooncakeEngine) -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def mortal(engine: MooncakeEngine) -> Iterator[Peer]:
    """A receiver of a test's own, to be frozen or killed."""
    peer = Peer()
    yield peer
    peer.close()


@pytest.fixture
def source() -> Buffer:
    buffer = Buffer(NBYTES)
    buffer.memory[:] = os.urandom(NBYTES)
    return buffer


@pytest.fixture
def deaf() -> Iterator[str]:
    """A session at which connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    # Closing the port ends the probes.
    reached(lambda: "mooncake-probe" not in thread_names())


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def unfinished(engine: MooncakeEngine) -> int:
    """Writes that timed out and are still under way."""
    with engine._lock:
        engine._reap()
    return len(engine._unfinished)


def writes(engine: MooncakeEngine, receiver: Peer, source: Buffer) -> bool:
    """Whether a write arrives; it may take the connection that a refusal is about to end."""
    try:
        engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)
    except UnavailableError:
        return False
    return True


def test_writes_of_many_threads_do_not_mix(engine, receiver, source):
    part = 64 * KIB
    errors: list[BaseException] = []

    def write(thread: int) -> None:
        try:
            for start in range(thread * MIB, (thread + 1) * MIB, part):
                engine.write(
                    receiver.session,
                    source.address + start,
                    receiver.address + start,
                    part,
                    PATIENCE_S,
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert receiver.read(0, NBYTES) == source.memory[:]


def test_other_threads_run_while_a_write_waits(engine, mortal, source):
    engine.write(mortal.session, source.address, mortal.address, 8, PATIENCE_S)
    mortal.freeze()

    def write() -> None:
        with contextlib.suppress(UnavailableError):
            engine.write(mortal.session, source.address, mortal.address, NBYTES, timeout_s=0.3)

    writer = threading.Thread(target=write)
    writer.start()

    turns = 0
    while writer.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10
    mortal.kill()
    reached(lambda: unfinished(engine) == 0)


@pytest.mark.parametrize("left_s", [0.0, -30.0])
def test_a_write_is_not_begun_after_its_deadline(engine, receiver, source, left_s):
    """As that of a process that was stopped between two pieces."""
    engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)
    before = receiver.read(0, NBYTES)
    source.memory[:] = bytes(byte ^ 1 for byte in source.memory[:KIB]) + source.memory[KIB:]

    with pytest.raises(UnavailableError, match="no time was left"):
        engine.write(receiver.session, source.address, receiver.address, KIB, left_s)

    assert receiver.read(0, NBYTES) == before


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(NBYTES - KIB, 2 * KIB), (-KIB, KIB), (NBYTES, KIB), (KIB, NBYTES)],
    ids=["across the end", "before", "behind", "large and across the end"],
)
def test_a_write_outside_registered_memory_is_refused(engine, receiver, source, offset, nbytes):
    before = receiver.read(0, NBYTES)

    with pytest.raises(UnavailableError, match="refused"):
        engine.write(
            receiver.session, source.address, receiver.address + offset, nbytes, PATIENCE_S
        )

    assert receiver.read(0, NBYTES) == before
    reached(lambda: writes(engine, receiver, source))


def test_a_write_to_unregistered_memory_is_refused_until_it_is_registered_again(
    engine, receiver, source
):
    assert receiver.tell("unregister") == "done"
    with pytest.raises(UnavailableError):
        engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)

    assert receiver.tell("register") == "done"
    reached(lambda: writes(engine, receiver, source))


def test_a_peer_that_died_is_unavailable_soon(engine, mortal, source):
    engine.write(mortal.session, source.address, mortal.address, KIB, PATIENCE_S)
    mortal.kill()

    started = time.monotonic()
    for _ in range(6):
        with pytest.raises(UnavailableError):
            engine.write(mortal.session, source.address, mortal.address, KIB, PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S


def test_nobody_at_the_address_is_unavailable(engine, source):
    with socket.create_server(("127.0.0.1", 0)) as server:
        session = f"127.0.0.1:{server.getsockname()[1]}"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cannot reach"):
            engine.write(session, source.address, 0, KIB, PATIENCE_S)


def test_a_probe_that_does_not_start_is_started_by_the_next_write(
    engine, receiver, source, monkeypatch
):
    start = threading.Thread.start

    def no_more(thread):
        if thread.name != "mooncake-probe":
            return start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    engine._forget(receiver.session)
    monkeypatch.setattr(threading.Thread, "start", no_more)
    with pytest.raises(RuntimeError, match="new thread"):
        engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)
    engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)


def test_a_peer_frozen_before_first_contact_holds_up_nobody_else(engine, receiver, source, deaf):
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="does not answer"):
            engine.write(deaf, source.address, 0, KIB, timeout_s=0.1)
        assert time.monotonic() - started < PATIENCE_S
    assert thread_names().count("mooncake-probe") == 1

    engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)


def test_a_write_to_a_frozen_peer_ends_at_its_deadline_and_may_arrive_later(
    engine, receiver, mortal, source
):
    class Owner:
        pass

    freed = threading.Event()
    owner = Owner()
    weakref.finalize(owner, freed.set)
    engine.write(mortal.session, source.address, mortal.address, 8, PATIENCE_S)
    mortal.freeze()

    started = time.monotonic()
    with pytest.raises(UnavailableError, match="in time") as given_up:
        engine.write(
            mortal.session, source.address, mortal.address + KIB, NBYTES - KIB, 0.2, keep=owner
        )
    assert 0.2 <= time.monotonic() - started < PATIENCE_S
    ended = given_up.value.ended
    del owner, given_up  # the error's frames hold the owner, too

    # The source stays until Mooncake is done with it, and others' writes go on.
    engine.write(receiver.session, source.address, receiver.address, KIB, PATIENCE_S)
    assert unfinished(engine) == 1
    assert not freed.is_set()
    assert not ended()

    mortal.thaw()
    reached(ended)
    assert unfinished(engine) == 0
    assert freed.is_set()
    assert mortal.read(KIB, 2 * KIB) == source.memory[:KIB]


class Raw:
    """Mooncake's interface, with nothing behind it."""

    def __init__(self, *, submitted: int = 7, status: int = 1) -> None:
        self.submitted = submitted
        self.status = status
        self.asked: list[int] = []

    def get_rpc_port(self) -> int:
        return 4711

    def send_probe(self, session: str) -> int:
        return 0

    def transfer_submit_write(self, *_: object) -> int:
        return self.submitted

    def transfer_check_status(self, batch: int) -> int:
        self.asked.append(batch)
        return self.status


def test_the_session_of_an_ipv6_host_has_brackets():
    assert MooncakeEngine("fd00::1", Raw()).session == "[fd00::1]:4711"
    assert MooncakeEngine("10.0.0.1", Raw()).session == "10.0.0.1:4711"


@pytest.mark.parametrize("answer", [0, -1, 2**64 - 1])
def test_the_status_of_what_was_not_submitted_is_never_asked(answer):
    """Mooncake answers that with a segmentation fault."""
    raw = Raw(submitted=answer)
    with pytest.raises(UnavailableError, match="cannot reach") as refused:
        MooncakeEngine("h", raw).write("peer:1", 0, 0, 8, 1.0)
    assert not raw.asked
    assert refused.value.ended is None, "nothing was begun"


def test_a_probe_that_raises_is_an_answer_and_not_the_last(monkeypatch):
    raw = Raw()
    engine = MooncakeEngine("h", raw)

    def raising(_session: str) -> int:
        raise RuntimeError("no such transport")

    with monkeypatch.context() as broken:
        broken.setattr(raw, "send_probe", raising)
        with pytest.raises(UnavailableError, match="cannot reach"):
            engine.write("peer:1", 0, 0, 8, PATIENCE_S)
    engine.write("peer:1", 0, 0, 8, PATIENCE_S)


def test_a_timeout_of_mooncakes_own_leaves_the_transfer_unfinished():
    raw = Raw(status=-2)
    engine = MooncakeEngine("h", raw)
    with pytest.raises(UnavailableError, match="in time"):
        engine.write("peer:1", 0, 0, 8, PATIENCE_S)
    assert unfinished(engine) == 1

    raw.status = -1
    assert unfinished(engine) == 0


def test_memory_that_overlaps_is_not_registered(engine, source):
    engine.register(source.address, NBYTES)
    with pytest.raises(ConfigError, match="overlap"):
        engine.register(source.address + KIB, KIB)
    assert engine._engine.unregister_memory(source.address) == 0


def test_mooncake_is_not_imported_with_the_module():
    code = "import sys, sglang_epd.transfer.mooncake; sys.exit('mooncake.engine' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


if __name__ == "__main__":
    receive()
