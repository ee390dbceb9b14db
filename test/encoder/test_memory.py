"""Freed memory goes back to the system."""

from pathlib import Path

from sglang_epd.encoder.memory import give_back

BLOCK_BYTES = 64 << 10  # small enough for the heap
BLOCKS = 2048


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_was_freed_is_given_back():
    blocks = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]
    last = bytearray(BLOCK_BYTES)  # keeps the heap's top where it is
    full = resident_bytes()
    blocks.clear()
    assert give_back()
    assert resident_bytes() < full - BLOCKS * BLOCK_BYTES * 3 // 4
    assert len(last) == BLOCK_BYTES
