"""What the tests of stores put in, count with, and hold up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch

from sglang_epd.store import SharedStore
from sglang_epd.store.entry import Sealer
from sglang_epd.wire.messages import Layout
from sglang_epd.wire.tensors import tensor_spec
from waiting import until

Open = Callable[..., Awaitable[SharedStore]]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def image(
    tokens: int = 4, width: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Layout, torch.Tensor]:
    """A layout of a picture and an embedding for it."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(tokens, width, generator=generator).to(dtype)
    return Layout("IMAGE", tensor_spec(embedding), [[1, 2, 2 * tokens]]), embedding


class Counts:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    def __call__(self, direction: str, outcome: str, seconds: float) -> None:
        (self.reads if direction == "read" else self.writes)[outcome] += 1


class FakeBackend:
    """A store in a dict that may be slow, or fail.

    Attributes:
        held: the entries, by name.
        error: raised by every call.
        gate: calls wait for it.
        calls: names that were asked for or written.
    """

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[tuple[str, str]] = []
        self.closed = False

    async def connect(self) -> None:
        await self._pass("connect", "")

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        await self._pass("get", name)
        found = self.held.get(name)
        return None if found is None else np.frombuffer(found, np.uint8).copy()

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        await self._pass("put", name)
        self.held[name] = b"".join(pieces)

    async def remove(self, name: str) -> None:
        await self._pass("remove", name)
        self.held.pop(name, None)

    async def close(self) -> None:
        await self._pass("close", "")
        self.closed = True

    async def _pass(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        await self.gate.wait()
        if self.error is not None:
            raise self.error


async def written(counts: Counts, number: int = 1) -> None:
    """Until so many writes have come to their end."""
    await until(lambda: counts.writes.total() >= number)


def sealed(key: bytes, layout: Layout, embedding: torch.Tensor, token: str = "") -> bytes:
    return b"".join(Sealer(token).seal(key, layout, embedding, 1.7e9))
