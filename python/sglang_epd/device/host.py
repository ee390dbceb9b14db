"""A device whose work is done when a call returns: the CPU, and those that are taken for one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from sglang_epd.device.protocol import Event, Stream


class _Done:
    """Stands for every stream and event: there is nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        return self


_DONE = _Done()


class Host:
    """See `protocol.Device`."""

    queues = False

    def __init__(self, name: torch.device | None = None) -> None:
        self.name = name or torch.device("cpu")

    def bind(self) -> None:
        if self.name.type != "cpu":
            torch.get_device_module(self.name).set_device(self.name)

    def stream(self) -> Stream:
        return _DONE

    def current(self) -> Stream:
        return _DONE

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.name)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, address: int, nbytes: int) -> None:
        pass

    def copy(
        self,
        source: torch.Tensor,
        destination: torch.Tensor,
        stream: Stream,
        waits: Iterable[Event] = (),
    ) -> Event:
        destination.copy_(source)
        return _DONE

    def hold(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def limit_memory(self, fraction: float) -> None:
        pass
