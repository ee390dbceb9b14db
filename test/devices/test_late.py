"""The device of the tests shows each mistake that CUDA would make a wrong number of."""

from __future__ import annotations

import pytest
import torch

from devices.late import LateDevice

SEEDS = range(20)
SIZE = 8


@pytest.fixture(params=SEEDS)
def device(request):
    return LateDevice(request.param, eagerness=(0.0, 0.3, 0.7)[request.param % 3])


def pinned(device, values):
    memory = device.pinned(SIZE * 4).view(torch.float32)
    memory.copy_(torch.full((SIZE,), float(values)))
    return memory


def filled(device, value):
    made = device.empty((SIZE,), torch.float32)
    made.fill_(value)
    return made


def landed(device, tensor, stream, waits=()):
    there = device.pinned(SIZE * 4).view(torch.float32)
    return there, device.copy(tensor, there, stream, waits)


def wrong(observe):
    """Whether some order of work makes another number than 3."""
    devices = [LateDevice(seed, eagerness=(0.0, 0.3, 0.7)[seed % 3]) for seed in SEEDS]
    return any(not bool((observe(device) == 3).all()) for device in devices)


def test_what_is_waited_for_is_right(device):
    compute, copies = device.stream(), device.stream()
    with device.use(compute):
        made = (filled(device, 1) + 2).view(2, -1).reshape(-1)
        event = compute.record_event()
    there, copied = landed(device, made, copies, [event])
    del made
    with device.use(compute):
        filled(device, 9)
    copied.synchronize()
    assert there.tolist() == [3.0] * SIZE
    assert copied.query()


def test_a_stream_that_waits_for_no_event():
    def observe(device):
        with device.use(device.stream()):
            made = filled(device, 3)
        there, copied = landed(device, made, device.stream())
        copied.synchronize()
        return there

    assert wrong(observe)


def test_a_host_that_waits_for_no_event():
    def observe(device):
        there, _ = landed(device, filled(device, 3), device.current())
        return there.clone()

    assert wrong(observe)


def test_memory_that_nobody_holds():
    def observe(device, hold=False):
        compute, copies = device.stream(), device.stream()
        with device.use(compute):
            made = filled(device, 3)
            event = compute.record_event()
        copies.wait_event(event)
        there = device.pinned(SIZE * 4).view(torch.float32)
        with device.use(copies):
            there.copy_(made, non_blocking=True)
        if hold:
            device.hold(made, copies)
        del made
        device.synchronize()
        return there

    assert wrong(observe)
    assert not wrong(lambda device: observe(device, hold=True))


def test_a_pinned_source_that_is_written_too_early():
    def observe(device, early=True):
        source, made = pinned(device, 3), device.empty((SIZE,), torch.float32)
        copied = device.copy(source, made, device.stream())
        if not early:
            copied.synchronize()
        source.fill_(4)
        copied.synchronize()
        return made.cpu()

    assert wrong(observe)
    assert not wrong(lambda device: observe(device, early=False))


def test_memory_that_is_written_again_on_another_stream():
    def observe(device):
        made = filled(device, 3)
        there, copied = landed(device, made, device.stream(), [device.current().record_event()])
        made.fill_(4)
        copied.synchronize()
        return there

    assert wrong(observe)


def test_host_memory_that_is_not_pinned_makes_calls_wait(device):
    source = torch.full((SIZE,), 3.0)
    made = device.empty((SIZE,), torch.float32)
    made.copy_(source, non_blocking=True)
    source.fill_(4)
    there = torch.empty(SIZE)
    there.copy_(made, non_blocking=True)
    assert there.tolist() == made.cpu().tolist() == [3.0] * SIZE
    assert made.sum().item() == 3.0 * SIZE


def test_memory_is_counted_until_its_last_view_is_gone():
    device = LateDevice(capacity_bytes=SIZE * 4)
    view = filled(device, 1).view(2, -1)
    with pytest.raises(torch.OutOfMemoryError):
        filled(device, 2)
    del view
    assert filled(device, 2).cpu().tolist() == [2.0] * SIZE
