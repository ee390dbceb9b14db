"""Embeddings on their way from the arena to the device that prefills.

A forward pass takes the rows of its part of the prompt when it is launched, while the
device is busy with the pass before. They are copied then, on a stream of their own: the
scheduler's thread queues the copies and goes on, and the pass waits for them on the device.
So no more rows are on the device than the passes in flight need, whatever waits in queues,
and the embedding stays in the arena for as long as SGLang may prefill its request again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from sglang_epd.device import Device, Event

if TYPE_CHECKING:  # benchmark/gpu/uploads.py runs where torch is all there is
    from sglang_epd.transfer.arena import Arena


class Stager:
    """Copies rows of embeddings to a device; of one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        # The sources of copies that may not be done: an arena's block is free when the last
        # tensor on it is gone.
        self._in_flight: deque[tuple[Event, torch.Tensor]] = deque()

    def __len__(self) -> int:
        """Copies whose source is held."""
        return len(self._in_flight)

    def register(self, arena: Arena) -> None:
        """Have the device read an arena by itself; see `Arena.register`."""
        arena.register(self._device)

    def stage(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of host memory on the device, for work on the current stream from now on.

        From registered memory the copy is queued only; from other memory it is made here.
        """
        self.let_go()
        with self._device.use(self._stream):
            staged = self._device.empty(rows.shape, rows.dtype)
        done = self._device.copy(rows, staged, self._stream)
        self._in_flight.append((done, rows))
        reader = self._device.current()
        reader.wait_event(done)
        self._device.hold(staged, reader)
        return staged

    def let_go(self) -> None:
        """Drop the sources of the copies that are done."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
