from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.transfer import arena as arena_module
from sglang_epd.transfer import writers as writers_module
from sglang_epd.transfer.arena import Address, Arena
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.writers import RemoteWriter, SharedWriter
from sglang_epd.wire import messages as wire
from waiting import reached

NBYTES = 16 * ALIGNMENT
PAYLOAD = np.arange(100, dtype=np.uint8)


def landing_in(address: Address, offset: int) -> wire.Shared:
    return wire.Shared(address.path, address.size, address.seal, offset)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NBYTES, readers=2)
    yield arena
    arena.close()


@pytest.fixture
def writer() -> SharedWriter:
    return SharedWriter()


def test_a_payload_lands_at_its_place_and_nowhere_else(arena, writer):
    writer.write(landing_in(arena.address, arena.data_offset + ALIGNMENT), PAYLOAD)
    assert arena.span(ALIGNMENT, 100).tolist() == PAYLOAD.tolist()
    assert int(arena.data.sum()) == int(PAYLOAD.sum())


def test_the_end_of_the_memory_can_be_written_to_and_nothing_beyond(arena, writer):
    end = arena.address.size
    writer.write(landing_in(arena.address, end - 100), PAYLOAD)
    assert arena.span(NBYTES - 100, 100).tolist() == PAYLOAD.tolist()
    for offset in (end - 99, end, 2**62, -1, 0):
        with pytest.raises(ProtocolError, match="outside"):
            writer.write(landing_in(arena.address, offset), PAYLOAD)


def test_the_memory_is_mapped_once(arena, writer, monkeypatch):
    landing = landing_in(arena.address, arena.data_offset)
    writer.write(landing, PAYLOAD)
    monkeypatch.setattr(Arena, "open", None)
    writer.write(landing, PAYLOAD[::-1])
    assert arena.span(0, 100).tolist() == PAYLOAD[::-1].tolist()


@pytest.mark.parametrize("touched", [True, False])
def test_a_place_that_was_prepared_is_written_to_without_page_faults(touched, writer, monkeypatch):
    pages = 1024
    arena = Arena.create(2 * pages * ALIGNMENT, readers=1)
    monkeypatch.setattr(arena_module, "_made_here", {})  # the encoder's map is another
    if touched:
        arena.data[:: ALIGNMENT // 2] = 7
    payload = np.ones(pages * ALIGNMENT, dtype=np.uint8)
    prepared = landing_in(arena.address, arena.data_offset)
    other = landing_in(arena.address, arena.data_offset + payload.nbytes)
    writer.prepare(prepared, payload.nbytes)
    assert arena.data[0] == (7 if touched else 0)
    assert faults_in(lambda: writer.write(prepared, payload)) < pages // 20
    assert faults_in(lambda: writer.write(other, payload)) >= pages // 2
    assert arena.data.all()


def test_a_place_is_prepared_once_until_its_memory_has_gone_back(writer, monkeypatch):
    pages = 1024
    arena = Arena.create(pages * ALIGNMENT, readers=1)
    monkeypatch.setattr(arena_module, "_made_here", {})  # the encoder's map is another
    place = landing_in(arena.address, arena.data_offset)
    payload = np.ones(pages * ALIGNMENT, dtype=np.uint8)

    def faults() -> int:
        if not writer.prepared(place, payload.nbytes):
            writer.prepare(place, payload.nbytes)
        return faults_in(lambda: writer.write(place, payload))

    assert faults() < pages // 20
    # Behind its back, to see whether it asks for the pages again.
    writer._arena(place)._map.madvise(mmap.MADV_DONTNEED)
    assert faults() >= pages // 2, "pages that are there are not asked for"
    arena.give_back([(0, payload.nbytes)])
    assert not arena.data.any()
    assert faults() < pages // 20
    assert arena.data.all()
    arena.close()


def test_what_cannot_be_prepared_is_left_to_the_write(arena, writer):
    landing = landing_in(arena.address, arena.data_offset + NBYTES)
    writer.prepare(landing, NBYTES)
    with pytest.raises(ProtocolError, match="outside"):
        writer.write(landing, PAYLOAD)


def faults_in(work: Callable[[], None]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_few_receivers_memory_stays_mapped(writer, monkeypatch):
    monkeypatch.setattr(writers_module, "_MAX_ARENAS", 2)
    arenas = [Arena.create(NBYTES, readers=1) for _ in range(4)]
    for arena in arenas:
        writer.write(landing_in(arena.address, arena.data_offset), PAYLOAD)
    assert list(writer._arenas) == [arena.address.seal for arena in arenas[2:]]
    writer.write(landing_in(arenas[0].address, arenas[0].data_offset), PAYLOAD + 1)
    assert arenas[0].data[0] == 1
    for arena in arenas:
        arena.close()


def test_the_memory_of_a_receiver_that_has_ended_is_let_go(writer):
    """Mapped here it would stay allocated for as long as this process runs."""
    code = (
        "from sglang_epd.transfer.arena import Arena\n"
        "arena = Arena.create(1, 1); address = arena.address\n"
        "print(address.path, address.size, address.seal.hex(), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    path, size, seal = process.stdout.readline().split()
    landing = wire.Shared(path, int(size), bytes.fromhex(seal), int(size) - 100)
    try:
        writer.write(landing, PAYLOAD)
        writer.forget_gone()
        assert len(writer._arenas) == 1
        inode = os.stat(path).st_ino
    finally:
        process.kill()
        process.communicate()
    assert mapped(inode)
    writer.forget_gone()
    gc.collect()
    assert not writer._arenas
    assert not mapped(inode)


def mapped(inode: int) -> bool:
    """Whether this process maps a file that has no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) and "epd-arena" in line for line in lines)


class Engine:
    """A transfer engine that writes into a dictionary."""

    name = "dictionary"

    def __init__(self, *, staged: bool = True) -> None:
        self.staged = staged
        self.registered: list[tuple[int, int]] = []
        self.written: dict[int, bytes] = {}
        self.timeouts: list[float] = []
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()

    def contact(self, session: str, deadline: float) -> None:
        if session == "gone:1":
            self.go_on.wait(deadline - time.monotonic())
            raise UnavailableError("gone:1 does not answer")

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    def write(
        self,
        session: str,
        local_address: int,
        remote_address: int,
        nbytes: int,
        timeout_s: float,
        *,
        keep: object = None,
    ) -> None:
        assert session == "there:1"
        staged = any(at <= local_address < at + size for at, size in self.registered)
        assert staged != isinstance(keep, np.ndarray)
        self.timeouts.append(timeout_s)
        assert self.go_on.wait(10)
        if self.error is not None:
            raise self.error
        self.written[remote_address] = ctypes.string_at(local_address, nbytes)


def test_a_remote_payload_goes_in_pieces_through_registered_memory():
    engine = Engine()
    writer = RemoteWriter(engine, buffers=2, nbytes=40)
    assert [size for _, size in engine.registered] == [40, 40]
    writer.write(wire.Remote("there:1", 1000), PAYLOAD, 5.0)
    assert list(engine.written) == [1000, 1040, 1080]
    assert b"".join(engine.written.values()) == PAYLOAD.tobytes()
    assert all(0 < left <= 5.0 for left in engine.timeouts)
    assert engine.timeouts == sorted(engine.timeouts, reverse=True)


def test_a_payload_that_the_engine_reads_from_anywhere_is_not_staged():
    engine = Engine(staged=False)
    writer = RemoteWriter(engine)
    writer.write(wire.Remote("there:1", 1000), PAYLOAD, 5.0)
    assert engine.written == {1000: PAYLOAD.tobytes()}
    assert not engine.registered


def test_a_failed_write_gives_its_buffer_back():
    engine = Engine()
    writer = RemoteWriter(engine, buffers=1, nbytes=40)
    engine.error = UnavailableError("the card is gone")
    for _ in range(3):
        with pytest.raises(UnavailableError, match="card"):
            writer.write(wire.Remote("there:1", 0), PAYLOAD, 5.0)
    engine.error = None
    writer.write(wire.Remote("there:1", 0), PAYLOAD, 5.0)
    assert len(engine.written) == 3


def test_who_gets_no_buffer_in_time_is_told():
    engine = Engine()
    writer = RemoteWriter(engine, buffers=1, nbytes=200)
    engine.go_on.clear()
    landing = wire.Remote("there:1", 0)
    first = threading.Thread(target=writer.write, args=(landing, PAYLOAD, 10.0))
    first.start()
    reached(lambda: engine.timeouts)
    for timeout_s in (0.02, 0.0, -1.0):
        with pytest.raises(UnavailableError, match="staging"):
            writer.write(landing, PAYLOAD, timeout_s)
    engine.go_on.set()
    first.join()
    writer.write(landing, PAYLOAD, 10.0)


def test_a_peer_whose_host_is_gone_holds_no_buffer():
    engine = Engine()
    writer = RemoteWriter(engine, buffers=1, nbytes=200)
    engine.go_on.clear()
    with ThreadPoolExecutor(4) as pool:
        lost = [pool.submit(writer.write, wire.Remote("gone:1", 0), PAYLOAD, 10.0)]
        lost += [pool.submit(writer.write, wire.Remote("gone:1", 0), PAYLOAD, 10.0)]
        sent = pool.submit(writer.write, wire.Remote("there:1", 0), PAYLOAD, 10.0)
        while not engine.timeouts:
            assert not sent.done()
        engine.go_on.set()
        sent.result()
        for one in lost:
            with pytest.raises(UnavailableError, match="does not answer"):
                one.result()


def test_writes_side_by_side_do_not_mix():
    engine = Engine()
    writer = RemoteWriter(engine, buffers=3, nbytes=64)
    payloads = [np.full(1000, number, np.uint8) for number in range(8)]
    threads = [
        threading.Thread(
            target=writer.write, args=(wire.Remote("there:1", number << 20), payload, 10.0)
        )
        for number, payload in enumerate(payloads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for address, piece in engine.written.items():
        assert set(piece) == {address >> 20}
    assert sum(map(len, engine.written.values())) == 8000
