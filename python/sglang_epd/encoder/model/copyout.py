"""From the accelerator to host memory, beside the tower.

A forward pass is put on a stream of its own, and its output copied on another, into one
of two pinned buffers, while the next pass runs. What comes back lies in ordinary memory:
pinned memory is scarce, and embeddings may be kept for long.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

_BUFFERS = 2


class CopyOut:
    """Runs forwards on a CUDA device, and copies what they make to the host.

    `launch` is called by one thread, and `land` by any other, once for each launch and
    in the same order.

    Args:
        device: torch's name of the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def launch(self, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Begin a forward pass and the copy of what it makes.

        Waits while both buffers are in use.

        Returns:
            The output as it will lie in a buffer, an event that is reached when it does,
            and the buffer: what `land` takes.
        """
        with torch.cuda.stream(self._compute):
            output = forward()
            made = torch.cuda.Event()
            made.record(self._compute)
        buffer = self._free.get()
        try:
            nbytes = output.numel() * output.element_size()
            if buffer.numel() < nbytes:
                buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            staged = buffer[:nbytes].view(output.dtype).view(output.shape)
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(made)
                staged.copy_(output, non_blocking=True)
                # The allocator must not hand its memory on before the copy has been made.
                output.record_stream(self._copies)
                copied = torch.cuda.Event()
                copied.record(self._copies)
        except BaseException:
            self._free.put(buffer)
            raise
        return staged, copied, buffer

    def land(
        self, staged: torch.Tensor, copied: Any, buffer: torch.Tensor, rows: list[int]
    ) -> list[torch.Tensor]:
        """Wait for a copy; the output's rows by item, each in memory of its own.

        Raises:
            RuntimeError: the forward pass failed on the device.
        """
        try:
            copied.synchronize()
            return [part.clone() for part in staged.split(rows)]
        finally:
            self._free.put(buffer)
