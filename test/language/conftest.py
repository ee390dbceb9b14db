from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.wire.http import ItemLayout
from sglang_epd.wire.messages import Landed, Layout, TensorSpec

READERS = 3
ROWS, WIDTH = 2, 4
NBYTES = ROWS * WIDTH * 4


@pytest.fixture
def described() -> Callable[..., ItemLayout]:
    """An item of so many rows, named by one letter."""

    def make(name: str = "a", rows: int = 6, modality: str = "IMAGE") -> ItemLayout:
        layout = Layout(modality, TensorSpec("float32", (rows, 4)), [[1, 1, rows]])
        return ItemLayout(name.encode() * 32, layout)

    return make


class Memory:
    """A real arena that several ranks read; what a receiver would have put there."""

    def __init__(self) -> None:
        self.arena = Arena.create(1 << 16, READERS)
        self._ranks = [Arena.open(self.arena.address) for _ in range(READERS)]
        self._landed = 0

    def rank(self, reader: int) -> Arena:
        """The arena as another process maps it."""
        return self._ranks[reader]

    def land(self, value: float) -> Landed:
        """An item whose embedding is full of `value`."""
        slot = self._landed
        self._landed += 1
        offset = slot * ALIGNMENT
        self.arena.span(offset, NBYTES).view(np.float32)[:] = value
        layout = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 2, 4]])
        return Landed(bytes([slot]) * 32, layout, NBYTES, slot, offset)

    def drops(self, item: Landed) -> list[int]:
        """How often each rank has given an item back."""
        counts: list[int] = self.arena.drops(np.array([item.slot]))[0].tolist()
        return counts

    def holds(self, reader: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a rank's memory, and was not copied out of it."""
        rank = self._ranks[reader]
        offset = tensor.data_ptr() - rank.machine_address
        return 0 <= offset < len(rank.data)

    def close(self) -> None:
        for arena in (self.arena, *self._ranks):
            arena.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


@pytest.fixture
def filled() -> Callable[[float], torch.Tensor]:
    return lambda value: torch.full((ROWS, WIDTH), value)
