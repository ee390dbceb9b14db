from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_epd.errors import ProtocolError, RequestCancelledError
from sglang_epd.transfer import arena as arena_module
from sglang_epd.transfer.arena import _NAME, Address, Arena
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.wire import messages as wire

NBYTES = 64 * ALIGNMENT


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(NBYTES, readers=2)
    yield arena
    arena.close()


def landed(slot: int = 0, offset: int = 0, rows: int = 2) -> wire.Landed:
    layout = wire.Layout("IMAGE", wire.TensorSpec("float32", (rows, 4)), [])
    return wire.Landed(b"k" * 32, layout, rows * 16, slot, offset)


def open_files() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return links


def memory_in_use(arena: Arena) -> int:
    return os.stat(arena.address.path).st_blocks * 512


def counts(arena: Arena, slot: int = 0) -> list[int]:
    return arena.drops(np.array([slot]))[0].tolist()


def test_another_process_maps_it(arena):
    code = (
        "import sys; from sglang_epd.transfer.arena import Address, Arena\n"
        "path, size, seal = sys.argv[1:]\n"
        "arena = Arena.open(Address(path, int(size), bytes.fromhex(seal), 2))\n"
        "arena.span(0, 4)[:] = 7; arena.drop(5, 1)"
    )
    address = arena.address
    command = [sys.executable, "-c", code, address.path, str(address.size), address.seal.hex()]
    subprocess.run(command, check=True)
    assert arena.span(0, 5).tolist() == [7, 7, 7, 7, 0]
    assert counts(arena, 5) == [0, 1]


def test_the_size_of_data_is_rounded_up_to_pages():
    arena = Arena.create(1, readers=1)
    assert len(arena.data) == ALIGNMENT
    arena.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, NBYTES + 1), (NBYTES, 1), (1, -1), (2**70, 1), (0, 2**70)]
)
def test_no_place_outside_is_given_out(arena, offset, nbytes):
    assert len(arena.span(0, NBYTES)) == NBYTES
    with pytest.raises(ProtocolError, match="outside"):
        arena.span(offset, nbytes)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/dev/null",
        "/etc/passwd",
        "/proc/self/fd/1",
        "/proc/1/fd/1/../../mem",
        "/proc/self/mem",
        "/proc/1/fd/",
        "/proc/1/fd/1\n",
        "proc/1/fd/1",
        "/proc/٣/fd/1",
    ],
)
def test_nothing_but_a_file_of_a_process_is_looked_at(arena, path):
    address = dataclasses.replace(arena.address, path=path)
    with pytest.raises((ProtocolError, OSError)):
        Arena.open(address)


@pytest.mark.parametrize("kind", ["file", "symlink", "null", "memfd", "pipe", "namesake"])
def test_what_is_not_an_arena_is_not_opened(arena, tmp_path, kind):
    """A peer names the path: nothing else that this user may write to can be reached."""
    target = tmp_path / ("memfd:" + _NAME if kind == "namesake" else "target")
    target.write_bytes(arena.address.seal + bytes(arena.address.size - len(arena.address.seal)))
    if kind == "null":
        fd = os.open("/dev/null", os.O_RDWR)
    elif kind == "memfd":
        fd = os.memfd_create("another")
    elif kind == "pipe":
        fd = os.open(f"/proc/self/fd/{os.pipe()[0]}", os.O_RDONLY | os.O_NONBLOCK)
    else:
        fd = os.open(target, os.O_RDWR)
    if kind == "namesake":
        target.unlink()
    path = f"/proc/{os.getpid()}/fd/{fd}"
    if kind == "symlink":
        (tmp_path / "link").symlink_to(arena.address.path)
        path = str(tmp_path / "link")
    before = open_files()
    with pytest.raises(ProtocolError):
        Arena.open(dataclasses.replace(arena.address, path=path))
    assert open_files() == before
    os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"size": ALIGNMENT},
        {"size": 0},
        {"size": -1},
        {"size": 2**62},
        {"seal": bytes(32)},
        {"seal": b""},
        {"seal": b"short"},
    ],
)
def test_another_arena_is_refused_and_nothing_stays_open(arena, change):
    before = open_files()
    with pytest.raises(ProtocolError):
        Arena.open(dataclasses.replace(arena.address, **change))
    assert open_files() == before


def test_a_path_that_is_turned_elsewhere_before_it_is_opened_is_refused(
    arena, tmp_path, monkeypatch
):
    """Between the look at where it leads and the opening the peer may change it."""
    target = tmp_path / "valuable"
    target.write_bytes(arena.address.seal + bytes(arena.address.size - len(arena.address.seal)))
    really_open = os.open
    monkeypatch.setattr(os, "open", lambda _path, *more: really_open(target, *more))
    before = open_files()
    with pytest.raises(ProtocolError, match="not an arena"):
        Arena.open(arena.address)
    assert open_files() == before


def test_an_arena_that_is_gone_cannot_be_opened(arena):
    address = Address(arena.address.path, arena.address.size, arena.address.seal)
    arena.close()
    with pytest.raises((FileNotFoundError, ProtocolError)):
        Arena.open(address)


def test_seals_cannot_be_guessed_from_one_another():
    first, second = Arena.create(1, 1), Arena.create(1, 1)
    assert first.address.seal != second.address.seal
    first.close()
    second.close()


def test_a_reading_ends_with_the_last_view_of_it_and_counts_once(arena):
    views = [arena.read(landed(slot=3, offset=ALIGNMENT), 1)]
    assert views[0].data_ptr() == arena.machine_address + ALIGNMENT
    views += [views[0][0], views[0].reshape(-1)]
    views.append(torch.split(views[2], 4)[1].to(torch.float32))
    copy = views[0].clone()
    while views:
        assert counts(arena, 3) == [0, 0]
        views.pop(0)
        gc.collect()
    assert counts(arena, 3) == [0, 1], "the copy does not keep it"
    del copy


def test_what_is_not_as_long_as_its_shape_says_is_counted_and_refused(arena):
    item = wire.Landed(b"", landed().layout, 31, 0, 0)
    with pytest.raises(ProtocolError, match="31 bytes"):
        arena.read(item, 0)
    gc.collect()
    assert counts(arena) == [1, 0], "it is given back, and only once"


def test_items_that_come_with_an_error_are_given_back(arena):
    settled = wire.Settled("0", (landed(), None), "RequestCancelledError", "gone")
    with pytest.raises(RequestCancelledError, match="gone") as raised:
        arena.receive(settled, 1)
    assert raised.tb is not None and counts(arena) == [0, 1]


def test_an_arena_stays_mapped_while_it_is_read():
    arena = Arena.create(NBYTES, readers=1)
    tensor = arena.read(landed(), 0)
    arena.close()
    del arena
    gc.collect()
    tensor.fill_(1.0)
    assert tensor.sum() == 8


def test_readings_dropped_on_many_threads_are_all_counted(arena):
    readings = [[arena.read(landed(), 0) for _ in range(500)] for _ in range(4)]
    start = threading.Barrier(4)

    def drop(own: list[torch.Tensor]) -> None:
        start.wait()
        while own:
            own.pop()

    threads = [threading.Thread(target=drop, args=(own,)) for own in readings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert counts(arena) == [2000, 0]


def test_a_slot_starts_again_from_nothing(arena):
    arena.drop(4, 0)
    arena.drop(5, 1)
    arena.reset(4)
    assert counts(arena, 4) == [0, 0]
    assert counts(arena, 5) == [0, 1]


def test_memory_is_taken_when_written_to_and_can_be_given_back(arena):
    assert memory_in_use(arena) < NBYTES // 2
    arena.data[:] = 1
    arena.drop(7, 1)
    assert memory_in_use(arena) >= NBYTES
    arena.give_back([(0, len(arena.data))])
    assert memory_in_use(arena) < NBYTES // 2
    assert not arena.data.any()
    assert counts(arena, 7) == [0, 1], "what readers counted stays"
    other = Arena.open(arena.address)  # and so does the seal
    other.data[:1] = 9
    assert arena.data[0] == 9
    other.close()


class Card(list):
    """Of a device: the memory that it was told of."""

    def register(self, address: int, nbytes: int) -> None:
        self.append((address, nbytes))


def test_memory_that_another_process_has_registered_is_not_given_back(arena, monkeypatch):
    monkeypatch.setattr(arena_module, "_made_here", {})
    other, card = Arena.open(arena.address), Card()
    assert other.machine_address != arena.machine_address
    arena.data[:] = 1
    other.register(card)
    assert card == [(other.machine_address, NBYTES)]
    arena.give_back([(0, NBYTES)])
    assert arena.data.all()
    other.close()


def test_pages_are_entered_before_they_are_written_to(arena, resident_kib, monkeypatch):
    monkeypatch.setattr(arena_module, "_made_here", {})
    monkeypatch.setattr(arena_module, "_POPULATED_BYTES", 3 * ALIGNMENT)
    arena.data[:] = 1
    other = Arena.open(arena.address)
    assert resident_kib(other) < NBYTES >> 11
    other.populate(0, NBYTES)
    assert resident_kib(other) >= NBYTES >> 10
    assert other.data.all()
    other.close()


def test_closing_twice_closes_nobody_elses_file(arena):
    arena.close()
    fd = os.open("/dev/null", os.O_RDONLY)
    arena.close()
    os.fstat(fd)
    os.close(fd)


def test_an_arena_leaves_nothing_behind():
    gc.collect()  # what other tests have left
    before = open_files()
    for _ in range(3):
        arena = Arena.create(NBYTES, readers=1)
        other = Arena.open(arena.address)
        other.close()
        arena.close()
        del arena, other
    gc.collect()
    assert open_files() <= before


def test_the_process_that_made_it_maps_it_once(monkeypatch):
    monkeypatch.setattr(arena_module, "_made_here", weakref.WeakValueDictionary())
    arena = Arena.create(NBYTES, readers=1)
    assert Arena.open(arena.address) is arena
    gone = weakref.ref(arena)
    arena.close()
    del arena
    gc.collect()
    assert gone() is None


def test_pages_of_the_system_are_what_is_allocated_in():
    assert ALIGNMENT % mmap.PAGESIZE == 0
