"""Passes on a device that orders work as badly as CUDA permits (`devices.late`)."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices.late import LateDevice
from sglang_epd.device import Host
from sglang_epd.encoder.memory import give_back
from sglang_epd.encoder.model.copyout import CopyOut

WIDTH = 3
CHUNK_BYTES = 64
DEPTH = 2
batches = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=8)


class Tower:
    """Multiplies by two, on a device.

    Args:
        static: whether every output lies in the same memory, as replays of a graph have it.
    """

    def __init__(self, device, *, static=False):
        self._device = device
        self._static = static
        self._output = None

    def __call__(self, pixels):
        made = self._device.empty(pixels.shape, pixels.dtype)
        made.copy_(pixels)
        made = made.t().contiguous().t() * 2  # not contiguous
        if not self._static:
            return made
        if self._output is None:
            self._output = self._device.empty((100, WIDTH), made.dtype)
        self._output[: len(made)].copy_(made)
        return self._output[: len(made)]


def pixels_of(number, rows, dtype):
    return (torch.arange(sum(rows) * WIDTH).reshape(-1, WIDTH) + 100 * number).to(dtype)


def wrong(device, copies, tower, batches, dtype, land_first=lambda: False):
    """Numbers of the batches whose rows are not those of their own pass."""
    under_way: deque = deque()
    failed = []

    def land():
        number, rows, launched = under_way.popleft()
        parts = copies.land(launched, rows)
        expected = (pixels_of(number, rows, dtype) * 2).split(rows)
        if not all(torch.equal(*pair) for pair in zip(parts, expected, strict=True)):
            failed.append(number)

    for number, rows in enumerate(batches):
        while under_way and (len(under_way) == DEPTH or land_first()):
            land()
        pixels = pixels_of(number, rows, dtype)
        under_way.append((number, rows, copies.launch(lambda pixels=pixels: tower(pixels))))
    while under_way:
        land()
    return failed


@given(batches, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.data())
def test_each_pass_gives_its_own_rows(batches, dtype, static, data):
    seed, eagerness = data.draw(st.tuples(st.integers(0, 999), st.sampled_from([0, 0.3, 0.7])))
    device = LateDevice(seed, eagerness)
    copies = CopyOut(device, reuses_output=static, chunk_bytes=CHUNK_BYTES)
    tower = Tower(device, static=static)
    with torch.inference_mode():
        assert not wrong(
            device, copies, tower, batches, dtype, lambda: bool(data.draw(st.booleans()))
        )
    assert device.pinned_bytes == 2 * CHUNK_BYTES
    del tower
    device.synchronize()
    assert device.used_bytes == 0


class WaitsForNothing(LateDevice):
    def copy(self, source, destination, stream, waits=()):
        return super().copy(source, destination, stream)


class ReachedAtOnce(LateDevice):
    def copy(self, source, destination, stream, waits=()):
        super().copy(source, destination, stream, waits)
        return self.stream().record_event()


@pytest.mark.parametrize(
    ("kind", "static"), [(WaitsForNothing, False), (ReachedAtOnce, False), (LateDevice, True)]
)
def test_what_the_order_rests_on(kind, static):
    """Without an event, or without a copy of an output that is written again, rows are wrong."""
    batches = [[3, 9], [4], [12, 1, 2]]
    failed = []
    for seed in range(10):
        device = kind(seed)
        copies = CopyOut(device, chunk_bytes=CHUNK_BYTES)
        failed += wrong(device, copies, Tower(device, static=static), batches, torch.float32)
    assert failed


def test_passes_of_one_thread_and_copies_of_another():
    device = LateDevice(7)
    copies = CopyOut(device, chunk_bytes=CHUNK_BYTES)
    tower = Tower(device)
    landed: deque = deque()
    with ThreadPoolExecutor(1) as lander:
        for number in range(200):
            if number >= DEPTH:
                parts, expected = landed.popleft()
                assert torch.equal(torch.cat(parts.result()), expected)
            rows = [number % 5, 3]
            pixels = pixels_of(number, rows, torch.float32)
            launched = copies.launch(lambda pixels=pixels: tower(pixels))
            landed.append((lander.submit(copies.land, launched, rows), pixels * 2))


def test_a_pass_that_fails_leaves_the_next_one_as_it_is():
    device = LateDevice(3)
    copies = CopyOut(device, chunk_bytes=CHUNK_BYTES)
    with pytest.raises(RuntimeError, match="shapes"):
        copies.launch(lambda: torch.ones(2) @ torch.ones(3, 1))
    assert not wrong(device, copies, Tower(device), [[5], [2, 7]], torch.float32)


def test_parts_share_no_memory_with_each_other_or_the_pass():
    copies = CopyOut(Host(), chunk_bytes=CHUNK_BYTES)
    output = torch.ones(20, WIDTH)
    first, second = copies.land(copies.launch(lambda: output), [15, 5])
    for part in (first, second):
        part.fill_(9)
        assert part.untyped_storage().nbytes() == part.nbytes
    assert bool((output == 1).all())


def test_new_memory_is_taken_before_the_first_copy():
    """So while the pass runs, which copies wait for."""
    resident = []

    class Watched(LateDevice):
        def copy(self, source, destination, stream, waits=()):
            resident.append(psutil.Process().memory_info().rss)
            return super().copy(source, destination, stream, waits)

    device = Watched()
    copies = CopyOut(device, chunk_bytes=1 << 20)
    rows = 1 << 14
    launched = copies.launch(lambda: device.empty([rows, 1024], torch.float32))
    give_back()  # what other tests have freed would not be new
    before = psutil.Process().memory_info().rss
    (part,) = copies.land(launched, [rows])
    assert len(part) == rows
    assert resident[0] - before >= 0.9 * rows * 4096
