"""CUDA devices (and ROCm's, which torch calls by the same names). Torch alone is needed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang_epd.device.protocol import Device, Event, Stream


def available() -> bool:
    return torch.cuda.is_available()


def empty_cache() -> None:
    """Give back what this process holds unused, on any device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def timestamp() -> Any:
    """An event on the current stream; two of them know the milliseconds between
    (`first.elapsed_time(last)`)."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def capture_beside_other_threads() -> None:
    """Have what other threads ask of the device not spoil the capture of a graph, as torch's
    default would."""
    torch.cuda.graph.__init__ = functools.partialmethod(  # type: ignore[method-assign,assignment]
        torch.cuda.graph.__init__, capture_error_mode="thread_local"
    )


class Cuda(Device):
    """A device whose work is queued.

    Args:
        index: of the device; the current one by default.
    """

    queues = True

    def __init__(self, index: int | None = None) -> None:
        self.name = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def bind(self) -> None:
        torch.cuda.set_device(self.name)

    def stream(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self.name)
        return stream

    def current(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self.name)
        return stream

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.name)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, address: int, nbytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error):
            with contextlib.suppress(RuntimeError):
                # CUDA tells of it once more, at the launch of the next kernel.
                self.empty([1], torch.uint8).fill_(0)
            torch.cuda.check_error(int(error))

    def copy(
        self,
        source: torch.Tensor,
        destination: torch.Tensor,
        stream: Any,
        waits: Iterable[Event] = (),
    ) -> Event:
        for event in waits:
            stream.wait_event(event)
        with self.use(stream):
            destination.copy_(source, non_blocking=True)
        for end in (source, destination):
            if end.device.type != "cpu":  # torch holds pinned memory by itself
                self.hold(end, stream)
        return self._after(stream)

    def _after(self, stream: Any) -> Event:
        # A thread that waits for it sleeps: by default it would spin.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        done: Event = event
        return done

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.name)

    def empty_cache(self) -> None:
        with torch.cuda.device(self.name):  # or it would make a context on the first device
            torch.cuda.empty_cache()

    def limit_memory(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, self.name)
