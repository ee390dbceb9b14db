"""What the device room and the way out of the tower do on a real GPU.

    PYTHONPATH=python python -m pytest -c /dev/null -q benchmark/gpu/test_device.py

Needs torch with CUDA, pytest and msgspec; without a GPU all is skipped. The tests of
test/devices show the same claims on a device that orders work at random. Each claim about
order comes with the same passes without what it rests on, which have to go wrong: else the
GPU was too fast to show anything.
"""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_epd.device import Device, Event, Stream, device_of
from sglang_epd.encoder.model.copyout import CopyOut, Launched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

PASSES = 10_000
DEPTH = 2
WIDTH = 16
SHAPE = (1024, 1024)
MIB = 1 << 20
CHILD = Path(__file__).with_name("device_child.py")


@pytest.fixture
def device() -> Iterator[Device]:
    device = device_of("cuda", 0)
    device.bind()
    yield device
    device.synchronize()
    device.empty_cache()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def linger(microseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(microseconds * 1500))


def tokens(number: int, rows: int, name: torch.device) -> torch.Tensor:
    """[rows, WIDTH], other ones for each number; exact in float32."""
    return torch.arange(rows * WIDTH, device=name, dtype=torch.float32).view(-1, WIDTH) + number


def wrong_passes(device: Device, copies: CopyOut, count: int) -> int:
    """Of some passes, how many gave other rows than their own.

    One thread launches them and another lands them, as in an encoder, two in flight.
    """
    drawn = random.Random(0)

    def launch(number: int, rows: int, delay: int) -> Launched:
        def forward() -> torch.Tensor:
            made = tokens(number, rows, device.name)
            if delay:
                linger(delay)
            return made * 1.0  # in memory that has what another pass made

        return copies.launch(forward)

    def land(number: int, rows: list[int], launched: Launched) -> bool:
        with torch.inference_mode():
            made = torch.cat(copies.land(launched, rows))
            return not torch.equal(made, tokens(number, sum(rows), torch.device("cpu")))

    landed: deque[Future[bool]] = deque()
    wrong = 0
    with ThreadPoolExecutor(1, initializer=device.bind) as lander:
        for number in range(count):
            if len(landed) == DEPTH:
                wrong += landed.popleft().result()
            rows = [drawn.randrange(0, 1500) for _ in range(drawn.randrange(1, 5))]
            launched = launch(number, sum(rows), drawn.choice((0, 0, 0, 50, 200)))
            landed.append(lander.submit(land, number, rows, launched))
        return wrong + sum(one.result() for one in landed)


def test_each_pass_gives_its_own_rows(device: Device) -> None:
    assert wrong_passes(device, CopyOut(device, chunk_bytes=64 << 10), PASSES) == 0


class GraphTower:
    """A CUDA graph for each number of rows, with one input and one output for all replays."""

    def __init__(self, device: Device) -> None:
        self._name = device.name
        self._graphs: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, number: int, rows: int) -> torch.Tensor:
        if rows not in self._graphs:
            given = torch.zeros(rows, WIDTH, device=self._name)
            _ = given * 2 + 1  # what is loaded at the first call is not captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = given * 2 + 1
            self._graphs[rows] = graph, given, made
        graph, given, made = self._graphs[rows]
        given.copy_(tokens(number, rows, self._name))
        graph.replay()
        return made

    @staticmethod
    def expected(number: int, rows: int) -> torch.Tensor:
        return tokens(number, rows, torch.device("cpu")) * 2 + 1


class Block(torch.nn.Module):
    """What SGLang's runner of graphs asks of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = SimpleNamespace(
            num_attention_heads_per_partition=2, head_size=WIDTH // 2, qkv_backend_name="fa3"
        )

    def forward(
        self,
        x: torch.Tensor,
        cu_seqlens: Any,
        rotary_pos_emb_cos: torch.Tensor,
        rotary_pos_emb_sin: torch.Tensor,
        output_ws: torch.Tensor,
    ) -> torch.Tensor:
        return x * 2 + 1


class SGLangTower(torch.nn.Module):
    """Blocks under SGLang's own runner, as Qwen3-VL's are."""

    dtype = torch.float32
    use_data_parallel = True  # captures for itself

    def __init__(self, device: Device) -> None:
        from sglang.srt.multimodal.vit_cuda_graph_runner import ViTCudaGraphRunner

        super().__init__()
        self.device = device.name
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.merger = torch.nn.Flatten(1)
        self.graph_runners = ViTCudaGraphRunner(self)

    def forward(self, number: int, rows: int) -> torch.Tensor:
        rotary = torch.zeros(rows, WIDTH // 2, device=self.device)
        made: torch.Tensor = self.graph_runners.run(
            x=tokens(number, rows, self.device),
            cu_seqlens=torch.tensor([0, rows], device=self.device, dtype=torch.int32),
            cu_window_seqlens=None,
            position_embeddings=None,
            rotary_pos_emb_cos=rotary,
            rotary_pos_emb_sin=rotary,
            attention_layout_key=(0, rows),
        )
        return made

    @staticmethod
    def expected(number: int, rows: int) -> torch.Tensor:
        return (tokens(number, rows, torch.device("cpu")) * 2 + 1) * 2 + 1


def wrong_replays(device: Device, tower: Any, *, reuses_output: bool) -> int:
    copies = CopyOut(device, reuses_output=reuses_output)

    def launch(number: int, rows: int) -> Launched:
        return copies.launch(lambda: tower(number, rows))

    wrong = 0
    for number in range(0, 200, 2):
        rows = (500, 1000, 4000)[number % 3]
        pair = [launch(number, rows), launch(number + 1, rows)]
        device.synchronize()  # the lander is late
        for one, launched in enumerate(pair, number):
            (part,) = copies.land(launched, [rows])
            wrong += not torch.equal(part, tower.expected(one, rows))
    return wrong


def test_outputs_of_graphs_are_copied_before_the_next_replay(device: Device) -> None:
    assert wrong_replays(device, GraphTower(device), reuses_output=True) == 0


def test_without_the_copy_replays_overwrite_each_other(device: Device) -> None:
    assert wrong_replays(device, GraphTower(device), reuses_output=False) > 0


def test_the_same_with_sglangs_runner_of_graphs(device: Device) -> None:
    pytest.importorskip("sglang")
    from sglang_epd.encoder.model.graphs import forget

    tower = SGLangTower(device)
    assert wrong_replays(device, tower, reuses_output=False) > 0
    assert wrong_replays(device, tower, reuses_output=True) == 0
    assert len(tower.graph_runners.block_graphs) == 3
    forget(tower, device, most=3)
    assert len(tower.graph_runners.block_graphs) == 0
    assert wrong_replays(device, tower, reuses_output=True) == 0


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHILD), *arguments],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_graphs_are_captured_beside_threads_that_use_the_device() -> None:
    told = child("capture", "beside")
    assert told.returncode == 0, told.stderr[-3000:]


def test_without_that_mode_other_threads_spoil_a_capture() -> None:
    """Or `capture_beside_other_threads` is not needed."""
    assert child("capture", "alone").returncode != 0


def test_a_device_assert_ends_the_child() -> None:
    """As broken, or before that by torch, which aborts where it frees pinned memory."""
    told = child("assert")
    said = told.stdout.splitlines()
    assert said[0] == "sound after a mistake of the item"
    assert told.returncode in (3, -signal.SIGABRT), told.stderr[-3000:]
    if told.returncode == 3:
        assert said[1].startswith("broken: it fails at everything (AcceleratorError: CUDA error")


def features(device: Device, value: float, *, wait: bool = True, hold: bool = True) -> bool:
    """Whether a pass reads what a processor left on the device in another thread."""
    pytest.importorskip("msgspec")
    from sglang_epd.encoder.model.features import mark, take
    from sglang_epd.encoder.tower import Prepared

    compute, theirs = device.stream(), device.stream()

    def prepare() -> Prepared:
        with device.use(theirs):
            feature = device.empty(SHAPE, torch.float32)
            linger(3000)
            feature.fill_(value)
            item = SimpleNamespace(feature=feature, model_specific_data={})
            layout: Any = None
            return mark(Prepared(layout, 1, "IMAGE", ("IMAGE", [item])), device)

    with ThreadPoolExecutor(1, initializer=device.bind) as preparing:
        batch = [preparing.submit(prepare).result()]
    with device.use(compute):
        if wait and hold:
            items = take(batch, device)
        else:
            items = batch[0].content[1]
            if wait:
                compute.wait_event(batch[0].content[2])
                linger(3000)
            else:
                device.hold(items[0].feature, compute)
        read = items[0].feature * 1.0
    del items, batch
    with device.use(theirs):  # which may get the memory of features that are gone
        others = [device.empty(SHAPE, torch.float32).fill_(-1) for _ in range(4)]
    device.synchronize()
    del others
    return bool((read == value).all())


def test_a_pass_reads_features_of_another_threads_stream(device: Device) -> None:
    assert features(device, 1.0)


def test_without_the_event_or_the_hold_features_are_wrong(device: Device) -> None:
    assert not features(device, 2.0, wait=False)
    assert not features(device, 3.0, hold=False)


def staged(device: Device, copy: Callable[..., Event]) -> bool:
    """Whether a copy of memory that is freed while it waits has what was there."""
    compute, copies = device.stream(), device.stream()
    with device.use(compute):
        made = device.empty(SHAPE, torch.float32).fill_(3)
        event = compute.record_event()
    there = device.pinned(made.nbytes).view(torch.float32).view(SHAPE)
    with device.use(copies):
        linger(5000)
    copied = copy(made, there, copies, [event])
    del made
    with device.use(compute):
        others = [device.empty(SHAPE, torch.float32).fill_(9) for _ in range(4)]
    copied.synchronize()
    del others
    return bool((there == 3).all())


def test_a_copy_holds_its_memory(device: Device) -> None:
    assert staged(device, device.copy)


def test_without_the_hold_memory_is_handed_on(device: Device) -> None:
    def copy(
        source: torch.Tensor, destination: torch.Tensor, stream: Stream, waits: list[Event]
    ) -> Event:
        for event in waits:
            stream.wait_event(event)
        with device.use(stream):
            destination.copy_(source, non_blocking=True)
        return stream.record_event()

    assert not staged(device, copy)


def test_out_of_memory_and_then_a_smaller_batch(device: Device) -> None:
    copies = CopyOut(device)
    whole = torch.cuda.get_device_properties(device.name).total_memory
    device.limit_memory(1600 * MIB / whole)

    def forward(rows: int) -> torch.Tensor:
        held = [torch.ones(rows, MIB, device=device.name) for _ in range(2)]
        return (held[0] + held[1])[:, :WIDTH]

    try:
        with pytest.raises(torch.OutOfMemoryError):
            copies.launch(lambda: forward(160))
        gc.collect()  # the frames of the error
        device.empty_cache()
        (part,) = copies.land(copies.launch(lambda: forward(80)), [80])
        assert bool((part == 2).all())
    finally:
        device.limit_memory(1.0)


def pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def test_a_huge_pass_takes_little_pinned_memory(device: Device) -> None:
    before = pinned_bytes()
    copies = CopyOut(device)
    rows = 16 * MIB  # 1 GiB
    launched = copies.launch(lambda: tokens(1, rows, device.name))
    (part,) = copies.land(launched, [rows])
    assert pinned_bytes() - before <= 64 * MIB
    assert torch.equal(part[-9:], launched.output[-9:].cpu())


def test_how_long_an_output_takes_to_the_host(
    device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints; the output is that of a 1080p picture in Qwen3-VL-8B, 66.8 MB."""
    rows = [2040 * 512]
    one = tokens(0, rows[0], device.name)
    whole = device.pinned(one.nbytes).view(torch.float32).view(one.shape)
    stream = device.stream()

    def copy_whole() -> torch.Tensor:
        device.copy(one, whole, stream).synchronize()
        return whole.clone()

    def by_chunks(mib: int) -> Callable[[], Any]:
        copies = CopyOut(device, chunk_bytes=mib * MIB)
        launched = copies.launch(lambda: one)
        return lambda: copies.land(launched, rows)

    arms: dict[str, Callable[[], Any]] = {
        "one pinned buffer, then a clone": copy_whole,
        "to pinned memory alone": lambda: device.copy(one, whole, stream).synchronize(),
        "to pageable memory": one.cpu,
    }
    arms |= {f"chunks of {mib} MiB": by_chunks(mib) for mib in (2, 4, 8, 16, 32)}
    told = [f"\n{one.nbytes / 1e6:.1f} MB to the host, median ms of 20, and of the processor:"]
    for name, arm in arms.items():
        took = []
        for _ in range(22):
            began = time.perf_counter(), time.thread_time()
            arm()
            took.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
        wall, processor = sorted(took[2:])[10]
        told.append(f"  {name:32} {wall * 1e3:7.2f} {processor * 1e3:7.2f}")
    with capsys.disabled():
        print("\n".join(told))
