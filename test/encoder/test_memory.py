"""Freed memory goes back to the system."""

import asyncio
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_epd.encoder import memory
from sglang_epd.encoder.memory import give_back
from waiting import until

BLOCK_BYTES = 64 << 10  # small enough for the heap
BLOCKS = 2048


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(check: str) -> list[int]:
    """The numbers that a program prints in a process of its own."""
    here = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=here, capture_output=True, text=True, check=True
    )
    return [int(number) for number in done.stdout.split()]


def test_what_was_freed_is_given_back():
    blocks = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    last = bytearray(BLOCK_BYTES)  # keeps the heap's top where it is
    full = resident_bytes()
    blocks.clear()
    assert give_back()
    assert resident_bytes() < full - BLOCKS * BLOCK_BYTES * 3 // 4
    assert len(last) == BLOCK_BYTES


async def test_memory_is_given_back_after_a_time_at_which_it_could_not_be(monkeypatch, caplog):
    tries = []

    def fails_once():
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(memory, "_EVERY_S", 0.01)
    monkeypatch.setattr(memory, "give_back", fails_once)
    finished = itertools.count()
    giving = asyncio.create_task(memory.give_back_in_time(lambda: next(finished), on_cpu=True))
    await until(lambda: len(tries) > 1)
    giving.cancel()
    assert "Free memory is kept for now" in caplog.text


def test_large_blocks_are_given_back_at_once():
    """Also after the first of them, from which on glibc would keep their like."""
    check = """
from sglang_epd.encoder.memory import keep_large_apart
from encoder.test_memory import resident_bytes
assert keep_large_apart()
first = bytearray(30 << 20)
del first
before = resident_bytes()
blocks = [bytearray(30 << 20) for _ in range(8)]
kept = blocks[-1]
blocks.clear()
print((resident_bytes() - before) >> 20)
"""
    (resident_mib,) = run(check)
    assert 29 <= resident_mib <= 35


def test_a_process_with_a_tower_keeps_large_blocks_for_the_next_item_until_it_is_idle():
    check = """
import resource, threading
from sglang_epd.encoder.memory import give_back, keep_freed, keep_large_apart
from encoder.test_memory import resident_bytes
assert keep_large_apart()  # as its server does first
assert keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
told = []
def run():
    for _ in range(4):
        before = faults()
        embedding, pixels = bytearray(67 << 20), bytearray(50 << 20)
        told.append(faults() - before)
        del embedding, pixels
thread = threading.Thread(target=run)
thread.start()
thread.join()
kept = resident_bytes()
assert give_back()
print(*told, (kept - resident_bytes()) >> 20)
"""
    *faults, given_back = run(check)
    assert max(faults[1:]) < 1000, faults  # 117 MiB have 29,952 pages
    assert given_back > 100


def test_collections_pass_over_what_is_there_when_a_server_begins():
    check = """
import gc
from sglang_epd.encoder.memory import keep_for_good
modules = [[] for _ in range(100_000)]
modules[0].append(modules)
before = len(gc.get_objects())
keep_for_good()
print(before, len(gc.get_objects()), gc.get_freeze_count())
"""
    before, after, kept = run(check)
    assert (before > 100_000, after < 1_000, kept > 100_000) == (True, True, True)


@pytest.mark.parametrize(
    ("on_cpu", "done", "given"),
    [
        (True, [0, 1, 2, 2, 3], [1, 2, 4]),
        # While nothing is finished, and every third turn.
        (False, [0, 1, 2, 3, 4, 4, 4], [3, 5]),
    ],
)
async def test_memory_is_given_back_when_something_was_finished(monkeypatch, on_cpu, done, given):
    monkeypatch.setattr(memory, "_EVERY_S", 0.0)
    monkeypatch.setattr(memory, "_TURNS_UNDER_LOAD", 3)
    told: list[int] = []
    monkeypatch.setattr(memory, "give_back", lambda: told.append(turn))
    turn = -1

    def finished() -> int:
        nonlocal turn
        turn += 1
        return done[turn]

    with pytest.raises(IndexError):
        await memory.give_back_in_time(finished, on_cpu=on_cpu)
    assert told == given
