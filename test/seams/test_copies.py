"""How often an embedding is copied on its way from the vision tower to prefill.

All of the way is real but for the tower's model and, in the last rows, the accelerator: the
engine, the encoder's pipeline, sender, receiver, assembly, and SGLang's layout of the prompt and
its function that gathers the rows of a pass. Copies are counted where bytes are moved. A dispatch
mode of torch's sees each of its operations. The arena's memory notes what is written to it, and
from where: if that is neither the tower's output nor a copy that was counted, there was another
on the way. Bytes that the kernel moves are counted as they are handed to it, and count twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from copies import documented
from sglang_epd.cache import EmbeddingCache, UrlMemory
from sglang_epd.device import Host
from sglang_epd.encoder.admission import Admission
from sglang_epd.encoder.breakage import Breakage
from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.model.engine import Engine
from sglang_epd.encoder.pipeline.computations import Computations
from sglang_epd.encoder.pipeline.scheduling import BatchBounds
from sglang_epd.encoder.service import EncoderService
from sglang_epd.encoder.tower import Prepared
from sglang_epd.encoder.urls import UrlReader
from sglang_epd.language.assembly import assemble
from sglang_epd.language.uploads import Stager
from sglang_epd.media import MediaFetcher, MediaLimits
from sglang_epd.observability.encoder import EncoderMetrics
from sglang_epd.seams import staging
from sglang_epd.transfer import arena as arena_module
from sglang_epd.transfer.arena import Arena
from sglang_epd.transfer.control import Claims
from sglang_epd.transfer.delivery import Offered
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.transfer.receiver import Receiver
from sglang_epd.transfer.sender import Sender
from sglang_epd.transfer.writers import RemoteWriter
from sglang_epd.wire.http import EncodeItem, EncodeRequest, ReplyTo
from sglang_epd.wire.messages import Expect, Layout, Offer, TensorSpec
from waiting import until

ROWS, WIDTH = 1024, 512
NBYTES = ROWS * WIDTH * 4
MARK = 7
PATIENCE_S = 30.0


class Copies(TorchDispatchMode):
    """What was copied, by torch in the threads that entered it, and by others that tell."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = {"torch": 0, "arena": 0, "kernel": 0}
        # Where embeddings lie, of which a copy was counted or which the tower has made.
        self._places: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        read = [one for one in tree_leaves([args, kwargs]) if isinstance(one, torch.Tensor)]
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and read:
                memory = tensor.untyped_storage().data_ptr()
                written = func is torch.ops.aten.copy_.default
                if written or all(one.untyped_storage().data_ptr() != memory for one in read):
                    self.nbytes["torch"] += tensor.nbytes
                    self.lies_in(tensor)
        return made

    def lies_in(self, tensor: torch.Tensor) -> None:
        begin = tensor.untyped_storage().data_ptr()
        self._places.append((begin, begin + tensor.untyped_storage().nbytes()))

    def count(self, by: str, source: np.ndarray | memoryview, times: int = 1) -> None:
        """Bytes of an embedding are copied by something else."""
        raw = np.frombuffer(source, np.uint8)
        begin = raw.ctypes.data
        known = any(first <= begin <= begin + len(raw) <= end for first, end in self._places)
        assert known, f"copied by {by} from a copy that was not counted"
        self.nbytes[by] += times * len(raw)

    def of_each(self, items: int) -> tuple[float, float]:
        """How often each byte of so many embeddings was copied: in a process, and by the kernel."""
        whole = items * NBYTES
        here = self.nbytes["torch"] + self.nbytes["arena"]
        return round(here / whole, 2), round(self.nbytes["kernel"] / whole, 2)


class Watched(np.ndarray):
    """An arena's memory: each write to it is counted."""

    copies: Copies

    def __setitem__(self, index: Any, value: Any) -> None:
        # Of a frame, as the kernel gave it: its bytes were counted when the kernel had them.
        assert self.copies.nbytes["kernel"] and not value.flags.owndata
        self.copies.nbytes["arena"] += value.nbytes
        super().__setitem__(index, value)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto:
            self.copies.count("arena", args[1])
        return super().__array_function__(function, types, args, kwargs)


class Queued(Host):
    """Poses as an accelerator: what is its own, and what is not, is memory of the host."""

    queues = True


class Watching(Sender):
    """Counts what it hands to the kernel, and shows its offers."""

    copies: Copies

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.offered: list[Offered] = []

    @property
    def grants(self) -> int:
        return sum(offered.granted is not None for offered in self.offered)

    @asynccontextmanager
    async def offer(self, endpoint: str, offer: Offer) -> AsyncIterator[Offered]:
        async with super().offer(endpoint, offer) as offered:
            self.offered.append(offered)
            yield offered

    async def _send(self, peer: Any, frames: list[bytes | memoryview]) -> None:
        for frame in frames[1:]:
            self.copies.count("kernel", frame, times=2)  # into it, and out of it
        await super()._send(peer, frames)


class Bare(Engine):
    """The engine without a model; runs its items together, and once their places are granted."""

    preparers = 4
    modalities = ("IMAGE",)
    dtype = "float32"
    weights_bytes = 0

    def __init__(self, copies: Copies, items: int, device: Host, sender: Watching) -> None:
        self._sender = sender
        self._device = device
        self._counted = copies
        self._copies = CopyOut(device) if device.queues else None
        self._most = None
        self._breakage = Breakage(self._probe)
        self._prepared = asyncio.Barrier(items)
        for name in ("tower", "lander"):
            setattr(self, f"_{name}", ThreadPoolExecutor(1, name, initializer=copies.__enter__))

    async def prepare(
        self, modality: str, data: bytes, deadline: float = 0.0, options: Any = None
    ) -> Prepared:
        await self._prepared.wait()
        layout = Layout("IMAGE", TensorSpec("float32", (ROWS, WIDTH)), [[1, 1, ROWS]])
        return Prepared(layout, ROWS, "IMAGE", None)

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        await until(lambda: self._sender.grants == len(batch))
        return await super().forward(batch)

    def _run(self, batch: Sequence[Prepared]) -> torch.Tensor:
        rows = ROWS * len(batch)
        made = torch.arange(float(rows)).unsqueeze(1).expand(-1, WIDTH).contiguous()
        self._counted.nbytes["torch"] = 0  # the tower's own
        self._counted.lies_in(made)
        return made


@pytest.fixture
def copies(monkeypatch) -> Iterator[Copies]:
    copies = Copies()
    monkeypatch.setattr(Watched, "copies", copies, raising=False)
    monkeypatch.setattr(Watching, "copies", copies, raising=False)
    begin, write = Arena.__init__, MooncakeEngine.write

    def watched(arena: Arena, *args: Any) -> None:
        begin(arena, *args)
        arena.data = arena.data.view(Watched)

    def watching(engine: MooncakeEngine, session: str, local: int, *args: Any, **more: Any) -> None:
        copies.count("kernel", more["keep"], times=2)
        assert local == more["keep"].ctypes.data
        write(engine, session, local, *args, **more)

    monkeypatch.setattr(Arena, "__init__", watched)
    monkeypatch.setattr(MooncakeEngine, "write", watching)
    # Sender and receiver map an arena as two processes do.
    monkeypatch.setattr(arena_module, "_made_here", {}.copy())
    with copies:
        yield copies


@pytest.fixture
def mooncake(monkeypatch) -> MooncakeEngine:
    """Over TCP, started as SGLang does."""
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    raw = pytest.importorskip("mooncake.engine", exc_type=ImportError).TransferEngine()
    assert raw.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return MooncakeEngine("127.0.0.1", raw)


@pytest.fixture
def processor(sglang) -> Any:
    """SGLang's layout of prompts with pictures, of any model."""
    base = sglang("multimodal.processors.base_processor").BaseMultimodalProcessor

    class Processor(base):
        IM_TOKEN_ID = MARK
        IM_START_TOKEN_ID = IM_END_TOKEN_ID = None
        process_mm_data_async = None

        def __init__(self) -> None:
            pass

    return Processor()


@pytest.fixture
async def gather(copies, processor, sglang, tmp_path) -> AsyncIterator[Callable[..., Any]]:
    """Have items encoded and delivered; the rows that each prefill has of them."""
    opened: list[Any] = []

    async def run(
        items: int, sender: Watching, device: Host, cache_bytes: int, engine: Any, apart: bool
    ) -> list[torch.Tensor]:
        budget = 4 * items * NBYTES
        path = tmp_path / "control"
        receiver = Receiver("127.0.0.1", "127.0.0.1", path, budget_bytes=budget, engine=engine)
        receiver.start()
        claims = Claims(path)
        arena = claims.connect(PATIENCE_S)
        metrics, cache = EncoderMetrics(), EmbeddingCache(cache_bytes)
        # So many patches that an idle accelerator waits for all items.
        tower, bounds = Bare(copies, items, device, sender), BatchBounds(3 * items * ROWS, items)
        opened.extend((receiver.stop, claims.close))
        async with MediaFetcher(MediaLimits()) as fetcher:
            service = EncoderService(
                computations=Computations([tower], cache, metrics, batch=bounds),
                urls=UrlReader(fetcher, UrlMemory(1), metrics),
                sender=sender,
                admission=Admission(8, 1 << 20),
                metrics=metrics,
                namespace="n",
                name="encoder",
            )
            claims.claim("t", Expect("t", items, PATIENCE_S))
            asked = [EncodeItem(n, "IMAGE", f"{n}", data=b"%d" % n) for n in range(items)]
            reply_to = ReplyTo(receiver.endpoint, "t")
            with service.receiving() as room:
                request = EncodeRequest("r", "n", PATIENCE_S, reply_to, asked)
                reply = await service.encode(request, room)
            await service.computations.close()
        assert [one.state for one in reply.outcomes] == ["delivered"] * items, reply
        settled: list[Any] = []
        await until(lambda: settled.extend(claims.take()) or settled)
        output = assemble(processor, [1, MARK, 2] * items, arena.receive(settled[0], 0))
        for item in output.mm_items:
            offset = item.precomputed_embeddings.data_ptr() - arena.machine_address
            assert 0 <= offset < len(arena.data), "it is read where it landed"
        passes = [[one] for one in output.mm_items] if apart else [output.mm_items]
        pick = sglang("managers.mm_schedule")._get_precomputed_embedding
        length = len(output.input_ids)
        return [
            pick(part, [0, len(part)], [0], [length], [[one.offsets for one in part]])
            for part in passes
        ]

    yield run
    for close in opened:
        close()


@pytest.fixture
def check(copies, gather) -> Callable[..., Any]:
    """Count the copies on the way, and compare them with those of some rows of the table."""

    async def run(
        *rows: str,
        items: int = 1,
        share_memory: bool = True,
        device: Host | None = None,
        cache_bytes: int = 0,
        engine: Any = None,
        apart: bool = True,
    ) -> None:
        remote = RemoteWriter(engine) if engine else None
        sender = Watching(remote, share_memory=share_memory)
        try:
            gathered = await gather(items, sender, device or Host(), cache_bytes, engine, apart)
        finally:
            await sender.close()
        table = documented()
        expected = tuple(sum(table[row][by] for row in rows) for by in (0, 1))
        assert copies.of_each(items) == pytest.approx(expected, abs=0.03)
        numbers = torch.cat([rows[:, -1] for rows in gathered]).tolist()
        assert sorted(numbers) == list(range(items * ROWS))

    return run


@pytest.mark.parametrize("items", [1, 2], ids=["alone in its pass", "one of a pass of two"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "frames"])
async def test_of_a_pass_to_its_prefill(check, items, shared):
    row = "shared memory" if shared else "frames"
    await check(row, items=items, share_memory=shared)


async def test_by_mooncake(check, mooncake):
    await check("Mooncake over TCP", items=2, engine=mooncake)


async def test_what_is_kept_as_well(check):
    await check("shared memory", "kept, of a pass of several", items=2, cache_bytes=1 << 30)


async def test_one_that_is_kept_and_was_alone_in_its_pass(check):
    await check("shared memory", cache_bytes=1 << 30)


async def test_a_prefill_of_several(check):
    await check("shared memory", "prefill of several items at once", items=2, apart=False)


async def test_a_tower_on_an_accelerator(check):
    await check("shared memory", "from an accelerator", items=2, device=Queued())


async def test_a_prefill_on_an_accelerator(check, hooked, monkeypatch):
    stager = Stager(Queued())
    monkeypatch.setattr(staging, "stager", lambda: stager)
    hooked("get_embedding_chunk")
    await check("shared memory", "onto an accelerator", items=2)
