"""From the accelerator to host memory, beside the tower.

A forward pass is queued on a stream of its own. Its output is copied on another, in chunks
through two pinned buffers, while the next pass runs. Pinned memory is scarce, and embeddings
may be kept for long: what comes back lies in ordinary memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from sglang_epd.device import Device, Event

# A chunk's way to the buffer should take longer than its bookkeeping, and a picture of 1080p
# several chunks, so that one is copied on while the next one arrives.
_CHUNK_BYTES = 16 << 20
_BUFFERS = 2
_PAGE_BYTES = 4096


class Launched(NamedTuple):
    """A forward pass that may still run.

    Attributes:
        output: what it makes, [rows, width] on the device.
        made: the event after which it is there.
    """

    output: torch.Tensor
    made: Event


class CopyOut:
    """Runs forward passes on a device, and copies what they make to the host.

    `launch` is called by one thread, and `land` by one other, once for each launch. What
    was launched and has not landed takes memory of the device: the caller bounds it.

    Args:
        device: the accelerator.
        reuses_output: whether a pass may write its output where an earlier one did, as
            replays of a CUDA graph do.
        chunk_bytes: size of a pinned buffer.
    """

    def __init__(
        self, device: Device, *, reuses_output: bool = False, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        self._device = device
        self._reuses_output = reuses_output
        self.stream = device.stream()
        self._copies = device.stream()
        self._buffers = [device.pinned(chunk_bytes) for _ in range(_BUFFERS)]

    def launch(self, forward: Callable[[], torch.Tensor]) -> Launched:
        """Begin a forward pass.

        Args:
            forward: queues the pass on the current stream, and returns its embeddings [tokens,
                width].
        """
        with self._device.use(self.stream):
            output = forward()
            # On this stream, after the pass and before the next.
            output = output.clone() if self._reuses_output else output.contiguous()
            return Launched(output, self.stream.record_event())

    def land(
        self, launched: Launched, rows: list[int], places: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Wait for a pass; its output by item.

        Args:
            rows: of each item.
            places: where they go; each into memory of its own unless given.

        Raises:
            RuntimeError: the pass failed on the device.
        """
        output, made = launched
        parts = places or [fresh((count, *output.shape[1:]), output.dtype) for count in rows]
        for part in parts:
            # New pages take longer than the copy into them: they are had while the pass runs.
            part.view(-1).view(torch.uint8)[::_PAGE_BYTES] = 0
        coming: deque[tuple[Event, torch.Tensor, torch.Tensor]] = deque()
        for number, (source, part) in enumerate(self._chunks(output.split(rows), parts)):
            if len(coming) == _BUFFERS:
                _take(*coming.popleft())
            buffer = self._buffers[number % _BUFFERS][: source.numel()]
            coming.append((self._device.copy(source, buffer, self._copies, [made]), buffer, part))
        while coming:
            _take(*coming.popleft())
        return parts

    def _chunks(
        self, sources: tuple[torch.Tensor, ...], parts: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for source, part in zip(sources, parts, strict=True):
            if part.numel():
                size = self._buffers[0].numel()
                yield from zip(
                    source.reshape(-1).view(torch.uint8).split(size),
                    part.view(-1).view(torch.uint8).split(size),
                    strict=True,
                )


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory by numpy, which asks the system for huge pages: to fill 67 MB for the first
    time took 11 ms instead of 31."""
    return torch.from_numpy(np.empty(shape, f"u{dtype.itemsize}")).view(dtype)


def _take(copied: Event, buffer: torch.Tensor, part: torch.Tensor) -> None:
    copied.synchronize()
    part.copy_(buffer)
