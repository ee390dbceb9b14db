"""Features that a processor left on the device, from one thread's stream to another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from devices.late import LateDevice
from sglang_epd.device import Host
from sglang_epd.encoder.model.features import PINNED_BYTES, mark, take
from sglang_epd.encoder.tower import Prepared
from sglang_epd.wire.messages import Layout, TensorSpec

LAYOUT = Layout("IMAGE", TensorSpec("float32", (4, 2)), [[1, 4, 4]], {})


def prepare(device, value):
    """As a preparing thread does, with pixels and something beside them on the device."""
    with device.use(device.stream()):
        feature, grid = (device.empty((4, 2), torch.float32).fill_(value) for _ in range(2))
        item = SimpleNamespace(feature=feature, model_specific_data={"more": [grid]})
        return mark(Prepared(LAYOUT, 4, "IMAGE", ("IMAGE", [item])), device)


def run(device, batch, compute):
    with device.use(compute):
        items = take(batch, device)
        read = [item.feature + item.model_specific_data["more"][0] for item in items]
        return torch.cat(read)


def wrong(run=run, prepare=prepare):
    for seed in range(20):
        device = LateDevice(seed, eagerness=(0.0, 0.3, 0.7)[seed % 3])
        compute = device.stream()
        with ThreadPoolExecutor(2) as preparing:
            batch = list(preparing.map(lambda value, one=device: prepare(one, value), (1, 2)))
        made = run(device, batch, compute)
        del batch  # and the tower's items with it
        device.synchronize()
        with device.use(compute):
            if made.cpu().tolist() != [[2.0, 2.0]] * 4 + [[4.0, 4.0]] * 4:
                return True
    return False


def test_a_pass_reads_what_other_threads_put_on_the_device():
    assert not wrong()


@pytest.mark.parametrize("missing", ["wait", "hold"])
def test_what_the_order_rests_on(missing):
    def run_carelessly(device, batch, compute):
        with device.use(compute):
            items = [item for prepared in batch for item in prepared.content[1]]
            for prepared in batch if missing == "hold" else []:
                compute.wait_event(prepared.content[2])
            for item in items if missing == "wait" else []:
                device.hold(item.feature, compute)
                device.hold(item.model_specific_data["more"][0], compute)
            read = [item.feature + item.model_specific_data["more"][0] for item in items]
            return torch.cat(read)

    assert wrong(run_carelessly)


def item_of(feature):
    return SimpleNamespace(feature=feature, model_specific_data={})


def marked(device, feature):
    item = item_of(feature)
    assert take([mark(Prepared(LAYOUT, 4, "IMAGE", ("IMAGE", [item])), device)], device) == [item]
    return item.feature


def test_features_in_host_memory_are_pinned():
    device = LateDevice()
    pixels = torch.arange(8.0).view(4, 2)
    held = marked(device, pixels)
    assert device.pinned_bytes == pixels.nbytes
    assert held.dtype == pixels.dtype
    assert torch.equal(held, pixels)
    # Queued beside the work before: the call does not wait, and the memory is there until then.
    with device.use(device.stream()):
        there = device.empty((4, 2), torch.float32).copy_(held, non_blocking=True)
    del held
    assert device.pinned_bytes == pixels.nbytes
    device.synchronize()
    assert torch.equal(there.cpu(), pixels)
    assert device.pinned_bytes == 0


@pytest.mark.parametrize(
    "feature",
    [
        torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4),
        torch.arange(24, dtype=torch.uint8).view(6, 4).T,
        torch.tensor(7),
    ],
    ids=["bfloat16", "transposed", "a number"],
)
def test_what_is_pinned_has_the_same_values(feature):
    held = marked(LateDevice(), feature)
    assert held.dtype == feature.dtype
    assert torch.equal(held, feature)


@pytest.mark.parametrize(
    ("device", "feature"),
    [
        (Host(), torch.ones(4, 2)),
        (LateDevice(), torch.ones(4, 2, dtype=torch.uint8).expand(PINNED_BYTES // 8 + 1, 4, 2)),
        (LateDevice(), torch.ones(0, 2)),
        (LateDevice(), "a proxy"),
    ],
    ids=["on a CPU", "too large", "empty", "not a tensor"],
)
def test_what_is_not_pinned_is_taken_as_it_is(device, feature):
    assert marked(device, feature) is feature
