"""A device of the tests, on a CPU, that orders work as badly as CUDA permits.

Tensors of it are `Late`: torch's calls on them are queued on the current stream, and run when
somebody has to wait for them, or sooner, as the random numbers have it. Only the order within
a stream, events and waits constrain them. Memory whose last tensor is gone is overwritten
with NaN by its stream, as if handed on, after what it was held for. A pinned buffer reads as
NaN from the moment at which a copy into it is queued until the copy has run. A pinned buffer
that is copied from is read when the copy runs.

`LateDevice` has the calls of `device.cuda.Cuda` that are made of others from there.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sglang_epd.device.cuda import Cuda

_POISON = 0xFF  # bytes of which every floating-point number is NaN
_aten = torch.ops.aten


@dataclass(frozen=True)
class Event:
    stream: Stream
    place: int

    @property
    def reached(self) -> bool:
        return self.stream.done >= self.place

    def query(self) -> bool:
        self.stream.device.drift()
        return self.reached

    def synchronize(self) -> None:
        self.stream.device.run_until(self)


class Stream:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.done = 0
        self.queue: deque[tuple[Callable[[], None], tuple[Event, ...]]] = deque()

    def put(self, work: Callable[[], None], waits: Iterable[Event] = ()) -> None:
        with self.device.lock:
            self.queue.append((work, tuple(waits)))
        self.device.drift()

    def wait_event(self, event: Event) -> None:
        self.put(lambda: None, [event])

    def record_event(self) -> Event:
        with self.device.lock:
            return Event(self, self.done + len(self.queue))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    @property
    def ready(self) -> bool:
        return bool(self.queue) and all(event.reached for event in self.queue[0][1])

    def step(self) -> None:
        self.device.busy = True
        try:
            with torch.inference_mode():
                self.queue[0][0]()
        finally:
            self.queue.popleft()
            self.done += 1
            self.device.busy = False


class _Block:
    """Memory of the device, as long as some tensor has it; queued work does not count."""

    def __init__(self, device: LateDevice, memory: torch.Tensor, owner: Stream) -> None:
        self.held: list[Stream] = []
        weakref.finalize(self, device.hand_on, memory, owner, self.held)


class Late(torch.Tensor):
    """A tensor of the device: `memory` is its content, once all that is queued has run."""

    memory: torch.Tensor
    block: _Block
    place: LateDevice

    @staticmethod
    def __new__(cls, memory: torch.Tensor, _block: _Block, place: LateDevice) -> Late:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=place.name,
        )

    def __init__(self, memory: torch.Tensor, block: _Block, place: LateDevice) -> None:
        self.memory = memory
        self.block = block
        self.place = place

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its class
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        late: list[Late] = []
        tree_map(lambda one: late.append(one) if isinstance(one, Late) else None, [args, kwargs])
        return late[0].place.call(func, late[0], args, kwargs or {})


def _memory(one: Any) -> Any:
    return one.memory if isinstance(one, Late) else one


class LateDevice(Cuda):
    """See `device.protocol.Device`.

    Args:
        seed: of the order.
        eagerness: how likely work runs before anybody waits for it.
        capacity_bytes: of memory that tensors may have at a time.
    """

    def __init__(
        self, seed: int = 0, eagerness: float = 0.3, capacity_bytes: float = float("inf")
    ) -> None:
        self.name = torch.device("meta")  # torch needs no driver for its tensors
        self.lock = threading.RLock()
        self.busy = False
        self.bound: set[int] = set()
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.emptied = 0
        self._streams: list[Stream] = []
        self._default = self.stream()
        self._current = threading.local()
        self._pinned: dict[int, int] = {}
        self._read_late: Counter[int] = Counter()

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    # What `Cuda` asks torch for.

    def bind(self) -> None:
        self.bound.add(threading.get_ident())

    def stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def current(self) -> Stream:
        stream: Stream = getattr(self._current, "stream", self._default)
        return stream

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        return self._new(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def pinned(self, nbytes: int) -> torch.Tensor:
        memory = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        where = memory.untyped_storage().data_ptr()
        self._pinned[where] = nbytes
        weakref.finalize(memory.untyped_storage(), self._pinned.pop, where, None)
        return memory

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        assert isinstance(tensor, Late)
        tensor.block.held.append(stream)

    def _after(self, stream: Any) -> Any:
        return stream.record_event()

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def empty_cache(self) -> None:
        self.emptied += 1

    # Order.

    def drift(self) -> None:
        """Run some work that nobody waits for."""
        with self.lock:
            # Within work the collector of cycles may hand memory on.
            while not self.busy and self._random.random() < self._eagerness:
                ready = [stream for stream in self._streams if stream.ready]
                if not ready:
                    return
                self._random.choice(ready).step()

    def run_until(self, event: Event) -> None:
        """Run what an event needs, and not much else."""
        with self.lock:
            while not event.reached:
                if event.stream.ready:
                    event.stream.step()
                else:
                    for earlier in event.stream.queue[0][1]:
                        self.run_until(earlier)
                self.drift()

    def hand_on(self, memory: torch.Tensor, owner: Stream, held: list[Stream]) -> None:
        """The memory's last tensor is gone: its stream may give it to others."""
        self.used_bytes -= memory.untyped_storage().nbytes()
        owner.put(lambda: _poison(memory), [stream.record_event() for stream in held])

    # torch's calls.

    def call(self, func: Any, first: Late, args: Any, kwargs: Any) -> Any:
        parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts  # made of other calls, which came here in turn
        if func is _aten.copy_.default:
            return self._copy(*args, **kwargs)
        if func is _aten._to_copy.default and torch.device(kwargs["device"]).type == "cpu":
            there = torch.empty(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            return self._copy(there, first)
        if func in (_aten._local_scalar_dense.default, _aten.equal.default):
            self.current().synchronize()
            return func(*tree_map(_memory, args), **kwargs)
        if func.is_view:
            return tree_map(
                lambda one: Late(one, first.block, self) if isinstance(one, torch.Tensor) else one,
                func(*tree_map(_memory, args), **kwargs),
            )
        return self._work(func, args, kwargs)

    def _work(self, func: Any, args: Any, kwargs: Any) -> Any:
        memory_args, memory_kwargs = tree_map(_memory, args), tree_map(_memory, kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.current().put(lambda: func(*memory_args, **memory_kwargs))
            return written[0]
        meta = tree_map(
            lambda one: one.to("meta") if isinstance(one, torch.Tensor) else one,
            (memory_args, memory_kwargs),
        )
        made = self._new(func(*meta[0], **meta[1]))
        there = made.memory

        def work() -> None:
            there.copy_(func(*memory_args, **memory_kwargs))

        self.current().put(work)
        return made

    def _new(self, like: torch.Tensor) -> Late:
        memory = torch.empty_like(like, device="cpu")
        _poison(memory)
        nbytes = memory.untyped_storage().nbytes()
        if self.used_bytes + nbytes > self._capacity_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.used_bytes += nbytes
        return Late(memory, _Block(self, memory, self.current()), self)

    def _copy(self, to: torch.Tensor, of: torch.Tensor, non_blocking: bool = False) -> Any:
        stream = self.current()
        source, destination = _memory(of), _memory(to)
        from_pinned = not isinstance(of, Late) and self._is_pinned(of)
        late_destination = isinstance(to, Late) or self._is_pinned(to)
        late_source = isinstance(of, Late) or from_pinned
        if not late_source:
            source = source.clone()  # staged by the driver
        self._read_late[_where(source)] += from_pinned
        if not isinstance(to, Late) and not self._read_late[_where(destination)]:
            _poison(destination)

        def work() -> None:
            destination.copy_(source)
            self._read_late[_where(source)] -= from_pinned

        stream.put(work)
        if not (non_blocking and late_source and late_destination):
            stream.synchronize()
        return to

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return _where(tensor) in self._pinned


def _where(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _poison(memory: torch.Tensor) -> None:
    if memory.is_contiguous():
        memory.view(-1).view(torch.uint8).fill_(_POISON)
    else:
        memory.fill_(float("nan"))
