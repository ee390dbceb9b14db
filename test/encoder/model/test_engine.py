"""The engine without SGLang's model, on a device whose memory is short."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from devices.late import LateDevice
from encoder.towers import key_of
from sglang_epd.cache import EmbeddingCache
from sglang_epd.encoder.breakage import Breakage
from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.model.engine import Engine, widen
from sglang_epd.encoder.model.features import mark, moved
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.tower import Prepared, TowerBrokenError
from sglang_epd.errors import RequestCancelledError
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.wire.messages import Layout, TensorSpec

ROWS, WIDTH = 4, 8
NBYTES = 4 * ROWS * WIDTH
ITEMS = 4


class Apart(Engine):
    """An item is named by a digit; a pass holds its patches and twice those on the device. The
    first items are ready at the same time, so that they are a batch."""

    preparers = ITEMS + 1  # items that do not tell their size leave one free
    modalities = ()

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._copies = CopyOut(device)
        self._most = self._patches = None
        self._has_graphs = self._moves_features = False
        self._encoder = SimpleNamespace(profiler=SimpleNamespace(step=lambda: None))
        self._target = SimpleNamespace(get_image_feature=self._twice)
        self._breakage = Breakage(self._probe, pause_s=0.01)
        self._tower = self._threads_of("epd-tower", 1)
        self._lander = self._threads_of("epd-land", 1)
        self.dtype = "float32"
        self.batches: list[int] = []
        self._asked = 0
        self._begun = asyncio.Event()

    @property
    def pools(self) -> tuple[ThreadPoolExecutor, ...]:
        return self._tower, self._lander

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Mapping[str, Any] | None = None,
    ) -> Prepared:
        self._asked += 1
        if self._asked == ITEMS:
            self._begun.set()
        await self._begun.wait()
        item = SimpleNamespace(
            feature=torch.full((ROWS, WIDTH), float(data)), model_specific_data={}
        )
        layout = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 1, ROWS]])
        content = (SimpleNamespace(name="IMAGE"), [item])
        return mark(Prepared(layout, ROWS, "IMAGE", content), self._device)

    def _twice(self, items: list[Any]) -> torch.Tensor:
        self.batches.append(len(items))
        there = self._device.empty((ROWS * len(items), WIDTH), torch.float32)
        for place, item in zip(there.split(ROWS), items, strict=True):
            place.copy_(item.feature, non_blocking=True)
        return there * 2


class Busy(LateDevice):
    """Says in which threads it was waited for."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waited: list[str] = []

    def empty_cache(self) -> None:
        self.waited.append(threading.current_thread().name)
        super().empty_cache()

    def synchronize(self) -> None:
        self.waited.append(threading.current_thread().name)
        super().synchronize()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_place_is_free_when_the_thread_of_what_nobody_wants_is(begun: bool) -> None:
    """Clients that leave would have more and more threads compute for nobody."""
    goes_on, entered, stopped = threading.Event(), threading.Event(), threading.Event()

    class Decoding:
        stop = staticmethod(stopped.set)

        def __enter__(self) -> None:
            entered.set()
            goes_on.wait()

        def __exit__(self, *_error: object) -> None: ...

    engine: Any = Engine.__new__(Engine)
    engine._device = LateDevice(0)
    engine._breakage = Breakage(Apart(LateDevice(0))._probe)
    engine._decoders = SimpleNamespace(begin=lambda _deadline: Decoding())
    layout = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 1, ROWS]])
    prepared = Prepared(layout, ROWS, "IMAGE", (SimpleNamespace(name="IMAGE"), []))
    engine._preparer = SimpleNamespace(prepare=lambda *_: prepared)
    engine._preparing = ThreadPoolExecutor(1)
    if not begun:
        engine._preparing.submit(goes_on.wait)
    preparing = asyncio.create_task(engine.prepare("IMAGE", b""))
    assert await asyncio.to_thread(entered.wait, 20 if begun else 0.05) is begun
    preparing.cancel()
    await asyncio.wait([preparing], timeout=0.1)
    assert stopped.is_set()
    assert preparing.done() is not begun
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    engine._preparing.shutdown()


async def test_a_probe_waits_for_the_device_beside_the_event_loop() -> None:
    device = Busy()
    await Apart(device)._probe()
    assert len(device.waited) == 2
    # Nor beside a pass, which may be capturing a graph.
    assert all(name.startswith("epd-tower") for name in device.waited)


class Broken(LateDevice):
    """Allocates nothing any more."""

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


async def test_a_rank_whose_device_is_broken_before_a_pass_ends_its_tower() -> None:
    """Its items would all fail as they are prepared, and a tower that has few items gets more."""
    rank = Apart(Broken(0))
    rank._alone = False
    unforeseen: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    unforeseen.set_exception(RuntimeError("in a preparing thread"))
    with pytest.raises(TowerBrokenError, match="fails at everything"):
        await rank._breakage.watch(unforeseen)


async def test_a_rank_whose_device_works_waits_for_no_other_rank() -> None:
    device = Busy()
    rank = Apart(device)
    rank._alone = False
    await rank._probe()
    assert not device.waited, "other streams may wait for other ranks"


async def test_what_nobody_wants_leaves_no_forgotten_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stopped(*_: Any) -> Prepared:
        entered.set()
        goes_on.wait()
        raise RequestCancelledError("it is no longer wanted")

    entered, goes_on = threading.Event(), threading.Event()
    engine: Any = Engine.__new__(Engine)
    engine._device = LateDevice(0)
    engine._breakage = Breakage(Apart(LateDevice(0))._probe)
    decoding = contextlib.nullcontext()
    decoding.stop = goes_on.set  # type: ignore[attr-defined]
    engine._decoders = SimpleNamespace(begin=lambda _deadline: decoding)
    engine._preparer = SimpleNamespace(prepare=stopped)
    engine._preparing = ThreadPoolExecutor(1)
    preparing = asyncio.create_task(engine.prepare("IMAGE", b""))
    await asyncio.to_thread(entered.wait)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    engine._preparing.shutdown()
    del preparing
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("seed", range(5))
async def test_a_batch_without_memory_gives_the_cache_back_and_is_run_in_halves(seed: int) -> None:
    device = LateDevice(seed, capacity_bytes=6 * NBYTES)
    engine = Apart(device)
    bounds = BatchBounds(patches=ITEMS * ROWS, items=ITEMS)
    computations = Computations([engine], EmbeddingCache(0), EncoderMetrics(), batch=bounds)
    holds = [
        computations.hold(key_of(name), "IMAGE", name, "r", time.monotonic() + 60)
        for name in (b"%d" % number for number in range(1, 2 * ITEMS + 1))
    ]
    for number, hold in enumerate(holds, 1):
        assert bool((await hold.embedding() == 2 * number).all())
        hold.release()
    await computations.close()
    assert ITEMS in engine.batches
    assert sum(engine.batches) > 2 * ITEMS, "all had memory"
    assert device.emptied
    assert engine.alive
    for pool in engine.pools:
        pool.shutdown()


class Capturing(nn.Module):
    """A tower that has no memory left while it has graphs."""

    class Runner:
        def __init__(self, _tower: object) -> None:
            self.block_graphs: dict[int, object] = {}

    def __init__(self, encode: Callable[[list[Any]], torch.Tensor]) -> None:
        super().__init__()
        self.cuda_graph_runner = self.Runner(self)
        self.cuda_graph_runner.block_graphs = {1: object(), 2: object()}
        self._encode = encode

    def get_image_feature(self, items: list[Any]) -> torch.Tensor:
        if self.cuda_graph_runner.block_graphs:
            raise torch.OutOfMemoryError("of graphs")
        return self._encode(items)


@pytest.mark.parametrize("alone", [True, False])
async def test_memory_that_graphs_have_filled_costs_them_and_no_item(alone: bool) -> None:
    device = LateDevice(0)
    engine = Apart(device)
    engine._has_graphs, engine._alone = True, alone
    engine._target = Capturing(engine._twice)
    engine._begun.set()
    batch = [await engine.prepare("IMAGE", b"3")]
    if alone:
        (made,) = await engine._forward_once(batch)
        assert bool((made == 6).all())
    else:
        # Ranks run the same passes, and none is run twice.
        with pytest.raises(torch.OutOfMemoryError):
            await engine._forward_once(batch)
    assert not engine._target.cuda_graph_runner.block_graphs
    for pool in engine.pools:
        pool.shutdown()


def test_features_are_moved_though_a_family_has_a_list_of_them():
    feature = [torch.zeros(2), [torch.zeros(3), None]]
    first, (second, nothing) = moved(feature, "meta")
    assert (first.device.type, second.device.type, nothing) == ("meta", "meta", None)


def test_items_that_wait_for_memory_leave_a_processor_threads_for_others():
    """SGLang's pools have four, or as many as prepare."""
    pool = ThreadPoolExecutor(1)
    processor = SimpleNamespace(io_executor=pool)
    widen(processor, 3)
    assert processor.io_executor is not pool
    assert not hasattr(processor, "preproc_executor")
    together = threading.Barrier(3)
    list(processor.io_executor.map(lambda _: together.wait(10), range(3)))
