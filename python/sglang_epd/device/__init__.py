"""The device that tensors live on: streams, events, copies, pinned memory.

`cuda` is the only file of the package that calls `torch.cuda`; `Host` does all at once. The
tests have a third device, which runs what it is given as late, and in as odd an order, as
CUDA permits.
"""

from __future__ import annotations

import torch

from sglang_epd.device.protocol import DEVICE_ERRORS, Device, Event, Host, Stream

__all__ = ["DEVICE_ERRORS", "Device", "Event", "Host", "Stream", "device_of"]


def device_of(name: str, index: int | None = None) -> Device:
    """The device that torch calls by this name, "cuda" or "cpu" say.

    A device of another kind than CUDA is taken as one whose calls are done when they return.

    Args:
        index: of the device; the current one of its kind, or the first, unless given.
    """
    if torch.device(name).type == "cuda":
        from sglang_epd.device.cuda import Cuda

        return Cuda(index)
    return Host(torch.device(name) if name == "cpu" else torch.device(name, index or 0))
