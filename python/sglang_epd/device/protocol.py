"""What the package asks of a device, and a device whose work is done when a call returns.

Work on a device is queued on streams. A stream runs what it was given in order; streams know
nothing of each other but by events. Memory of the device belongs to the stream that was
current when it was allocated: when its last tensor goes, later work of that stream may get
it at once, whatever other streams still do with it. `hold` and `copy` see to that.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

# Of a device, whatever was run there; torch derives both from `RuntimeError`.
DEVICE_ERRORS = torch.OutOfMemoryError, torch.AcceleratorError


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Whether the stream has come that far."""

    def synchronize(self) -> None:
        """Wait in this thread until it has.

        Raises:
            RuntimeError: something that the device was given fails.
        """


class Stream(Protocol):
    """A queue of work; `torch.cuda.Stream` is one."""

    def wait_event(self, event: Any) -> None:
        """What is queued from now on runs after the event."""

    def record_event(self) -> Event:
        """The place after all that is queued now."""

    def synchronize(self) -> None:
        """Wait in this thread for all that is queued."""


class _Done:
    """Stands for every stream and event of `Host`: there is nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> Event:
        return self


_DONE = _Done()


class Device:
    """One device, safe to call from several threads.

    What a method does here is enough where work is not queued. `Cuda` has all of its own.

    Attributes:
        name: torch's, with its index.
        queues: whether work is queued. If not, it is done when a call returns.
    """

    name: torch.device
    queues: bool

    def bind(self) -> None:
        """Make it this thread's current device, for code that asks for none."""

    def stream(self) -> Stream:
        """A new stream."""
        return _DONE

    def current(self) -> Stream:
        """The stream on which this thread's work is queued."""
        return _DONE

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Queue this thread's work on a stream, and allocate memory that belongs to it."""
        return nullcontext()

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device that belongs to the current stream.

        Raises:
            torch.OutOfMemoryError: there is no room; a smaller call may succeed.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=self.name)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes [nbytes] of host memory that copies read and write beside other work.

        They are not handed on before the copies of `copy` that use them are done.
        """
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, address: int, nbytes: int) -> None:
        """Let copies treat some of this process's memory as they do `pinned`'s.

        Unlike that, nothing holds it: it must stay as it is until the process ends.

        Raises:
            RuntimeError: the driver refuses.
        """

    def copy(
        self,
        source: torch.Tensor,
        destination: torch.Tensor,
        stream: Stream,
        waits: Iterable[Event] = (),
    ) -> Event:
        """Queue a copy on a stream, after some events.

        The memory of both ends is held until the copy is done. Their content is not: nobody
        may write the source, nor touch the destination, before the event. With host memory
        that is not pinned the call may itself wait for the copy.

        Args:
            source, destination: of one shape; one of them may be in host memory.
            waits: events that the copy runs after.

        Returns:
            The event after the copy.
        """
        destination.copy_(source)
        return _DONE

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Not to hand the tensor's memory on before all that is queued on a stream when its
        last tensor goes."""

    def synchronize(self) -> None:
        """Wait in this thread for all streams.

        Raises:
            RuntimeError: the device fails at something that it was given. CUDA repeats such
                an error at every call until the process ends.
        """

    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the device's other processes."""

    def limit_memory(self, fraction: float) -> None:
        """Let this process allocate no more than a fraction of the device's memory.

        Args:
            fraction: 0 to 1.
        """


class Host(Device):
    """The CPU, and devices that are taken for one: their work is done when a call returns."""

    queues = False

    def __init__(self, name: torch.device | None = None) -> None:
        self.name = name or torch.device("cpu")

    def bind(self) -> None:
        if self.name.type != "cpu":
            torch.get_device_module(self.name).set_device(self.name)
