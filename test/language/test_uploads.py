"""On a device that runs work as late, and in as odd an order, as CUDA permits: the rows that a
pass reads are those that landed, and nothing is held when it is over."""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from devices.late import LateDevice
from sglang_epd.language.uploads import Stager
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.reservations import Reservations
from sglang_epd.wire.messages import Landed, Layout, Offer, TensorSpec

WIDTH = 32
ROWS = ALIGNMENT // WIDTH // 4
ARENA_BLOCKS = 3


class DeviceOfArena(LateDevice):
    """Reads registered memory when a copy runs, and knows its bytes only: nothing of the
    arena's is held by a copy that is queued."""

    region = torch.empty(0, dtype=torch.uint8)

    def register(self, address: int, nbytes: int) -> None:
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        self.region = torch.frombuffer(raw, dtype=torch.uint8)
        self._pinned[address] = nbytes

    def copy(self, source, destination, stream, waits=()):
        begin = source.data_ptr() - self.region.data_ptr()
        if 0 <= begin < len(self.region):
            raw = self.region[begin : begin + source.nbytes]
            source = raw.view(source.dtype).view(source.shape)
        return super().copy(source, destination, stream, waits)


class Rank:
    """A scheduler that prefills from an arena of three embeddings, and its receiver."""

    def __init__(self, seed: int, *, registered: bool) -> None:
        self.random = random.Random(seed)
        self.device = DeviceOfArena(seed, eagerness=(0.0, 0.2, 0.7)[seed % 3])
        self.arena = Arena.create(ARENA_BLOCKS * ALIGNMENT, readers=1)
        self.reservations = Reservations(
            len(self.arena.data),
            16,
            1,
            drops=self.arena.drops,
            reset=self.arena.reset,
            writer_lives=lambda _: None,
        )
        self.stager = Stager(self.device)
        if registered:
            self.stager.register(self.arena)
        self.forward = self.device.stream()
        self.landed = 0

    def land(self) -> tuple[Block, torch.Tensor] | None:
        """A block with the next number in each place, and the rows that a request is given;
        None where the arena is full."""
        self.stager.let_go()
        self.reservations.reclaim(0.0)
        layout = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 1, ROWS]])
        key = bytes([self.landed + 1]) * 32
        block = self.reservations.grant(Offer("t", 0, key, layout, ALIGNMENT))
        if block is None:
            return None
        self.landed += 1
        self.arena.span(block.offset, block.nbytes).view(np.float32)[:] = self.landed
        self.reservations.fill(block)
        self.reservations.hand(block, 0, 1)
        self.reservations.close(block)
        item = Landed(key, layout, block.nbytes, block.slot, block.offset)
        return block, self.arena.read(item, 0)

    def landed_now(self) -> tuple[Block, torch.Tensor]:
        """The same where there is room."""
        found = self.land()
        assert found is not None
        return found

    def prefill(self, rows: torch.Tensor) -> torch.Tensor:
        """What a pass makes of rows, on the forward stream."""
        with self.device.use(self.forward):
            return self.stager.stage(rows) * 1

    def close(self) -> None:
        self.device.synchronize()
        self.stager.let_go()
        self.arena.close()


@pytest.fixture(params=[(seed, registered) for seed in range(30) for registered in (True, False)])
def rank(request) -> Iterator[Rank]:
    seed, registered = request.param
    rank = Rank(seed, registered=registered)
    yield rank
    rank.close()


def test_a_pass_reads_what_landed_whatever_becomes_of_the_request(rank):
    """Requests end right after their pass was launched, and their blocks are written again as
    soon as the receiver may."""
    waiting: list[tuple[int, torch.Tensor]] = []
    passes: list[tuple[int, int, torch.Tensor]] = []
    for _ in range(60):
        if rank.random.random() < 0.6:
            found = rank.land()
            if found is not None:
                waiting.append((rank.landed, found[1]))
            del found
        if waiting and rank.random.random() < 0.6:
            number, rows = waiting.pop(rank.random.randrange(len(waiting)))
            if rank.random.random() < 0.8:  # else it is aborted
                first = rank.random.randrange(ROWS)
                passes.append((number, ROWS - first, rank.prefill(rows[first:])))
            del rows
        if rank.random.random() < 0.1:
            rank.device.synchronize()
    assert len(passes) > 5
    with rank.device.use(rank.forward):
        for number, count, made in passes:
            assert (made.cpu() == torch.full((count, WIDTH), float(number))).all(), number
    assert rank.landed > ARENA_BLOCKS, "no block was used twice"


def test_nothing_is_held_when_passes_are_over(rank):
    block, rows = rank.landed_now()
    made = rank.prefill(rows)
    del rows
    rank.device.synchronize()
    rank.stager.let_go()
    assert not len(rank.stager)
    rank.reservations.reclaim(0.0)
    assert not len(rank.reservations), block
    assert rank.device.used_bytes == made.nbytes
    del made
    gc.collect()
    assert rank.device.used_bytes == 0


@pytest.fixture
def lazy() -> Iterator[Rank]:
    """Runs nothing unless somebody waits."""
    rank = Rank(0, registered=True)
    yield rank
    rank.close()


def test_a_block_is_not_used_again_before_its_copy_is_done(lazy):
    lazy.prefill(lazy.landed_now()[1])
    lazy.stager.let_go()
    lazy.reservations.reclaim(0.0)
    assert len(lazy.stager) == len(lazy.reservations) == 1
    lazy.device.synchronize()
    lazy.stager.let_go()
    lazy.reservations.reclaim(0.0)
    assert not len(lazy.reservations)


def test_a_block_is_let_go_at_the_next_copy_where_nobody_asks(lazy):
    (first, rows), (second, more) = lazy.landed_now(), lazy.landed_now()
    lazy.prefill(rows)
    del rows
    lazy.device.synchronize()
    lazy.prefill(more)
    lazy.reservations.reclaim(0.0)
    assert first.state is BlockState.FREE
    assert second.state is BlockState.HANDED


def test_the_host_waits_for_nothing_where_memory_is_registered(lazy):
    for _ in range(ARENA_BLOCKS):
        lazy.prefill(lazy.landed_now()[1])
    assert not lazy.forward.done
    assert len(lazy.stager) == ARENA_BLOCKS


def test_what_is_staged_is_as_large_as_the_rows_that_were_asked_for(lazy):
    _, rows = lazy.landed_now()
    with lazy.device.use(lazy.forward):
        staged = lazy.stager.stage(rows[2:5])
    assert lazy.device.used_bytes == staged.nbytes == 3 * WIDTH * 4
