"""The engine of test workers: each media's text says what happens to it.

rows=N          an embedding of N rows, all of them the media's length
bad, broken     prepare raises MediaError, RuntimeError
stuck           prepare never ends
kept            a row more where the worker's objects are kept out of collections
slow=S          forward takes S seconds
begins=FILE     forward makes this file when it is the item's turn
lands=FILE      the rows land once there is this file
fails, refused  forward raises RuntimeError, EncodeError
breaks          forward finds the engine broken
fails@R         the same on rank R only; the other ranks meet it in vain and hang
hangs           forward never ends
odd@R           rank R lays it out differently
strange         it is laid out with something that no message can hold
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_epd.encoder import memory
from sglang_epd.encoder.tower import Prepared, ProfileRequest, TowerBrokenError
from sglang_epd.errors import EncodeError, MediaError, ProtocolError
from sglang_epd.wire.messages import Layout, TensorSpec

if TYPE_CHECKING:
    import torch

WIDTH = 64


class FakeEngine:
    preparers = 4
    depth = 2
    dtype = "float32"
    modalities = ("IMAGE", "VIDEO")
    weights_bytes = 1000

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._traces: Path | None = None
        self._tower = ThreadPoolExecutor(1)

    async def warm_up(self) -> None:
        pass

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        wishes = dict(
            (wish.partition("=")[0], wish.partition("=")[2])
            for wish in data[:256].decode().strip().split(",")
        ) | (options or {})
        if "bad" in wishes:
            raise MediaError("cannot be decoded: it is bad")
        if "broken" in wishes:
            raise RuntimeError("a secret of the engine")
        if "stuck" in wishes:
            await asyncio.sleep(3600)
        rows = int(wishes.get("rows", "2")) + (f"odd@{self._rank}" in wishes)
        rows += "kept" in wishes and gc.get_freeze_count() > 0
        extra: dict[str, Any] = {"times": list(range(int(wishes.get("extra", "0"))))}
        if "strange" in wishes:
            extra["object"] = object()
        layout = Layout(modality, TensorSpec("float32", (rows, WIDTH)), [[1, 2, rows]], extra)
        return Prepared(layout, 4 * rows, (modality, WIDTH), (wishes, len(data)))

    async def forward(self, batch: Sequence[Prepared], tell: Any = None) -> list[torch.Tensor]:
        made = await asyncio.get_running_loop().run_in_executor(self._tower, self._forward, batch)
        for prepared in batch:
            while "lands" in (wishes := prepared.content[0]) and not Path(wishes["lands"]).exists():
                await asyncio.sleep(0.001)
        return made

    def discard(self, prepared: Prepared) -> None:
        pass

    async def profile(self, asked: ProfileRequest | None) -> None:
        """Leaves a file, and refuses to end what was not begun."""
        if asked is not None:
            self._traces = Path(asked.output_dir or "") / f"{asked.profile_prefix}{self._rank}"
        elif self._traces is None:
            raise ProtocolError("profiling not running")
        else:
            self._traces.touch()

    def _forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        made = []
        for prepared in batch:
            wishes, length = prepared.content
            if "begins" in wishes:
                Path(wishes["begins"]).touch()
            time.sleep(float(wishes.get("slow", "0")))
            if "breaks" in wishes:
                raise TowerBrokenError("it fails at everything")
            if "refused" in wishes:
                raise EncodeError("the layouts say another shape")
            if "fails" in wishes or f"fails@{self._rank}" in wishes:
                raise RuntimeError("a secret of the engine")
            if "hangs" in wishes or any(wish.startswith("fails@") for wish in wishes):
                time.sleep(3600)
            import torch  # takes seconds, which workers that make nothing do not spend

            made.append(torch.full(prepared.layout.embedding.shape, float(length)))
        return made


def create(options: dict[str, Any]) -> FakeEngine:
    """Options say what goes wrong at the start, and which file there is when memory was given
    back."""
    if "tidied" in options:
        tidied = Path(options["tidied"])
        memory._EVERY_S, memory.give_back = 0.01, lambda: bool(tidied.write_bytes(b"yes"))
    if "error" in options:
        raise ValueError(options["error"])
    if "later" in options:
        # A file: the first start goes well, the second does not.
        later = Path(options["later"])
        if later.exists():
            later.unlink()
            raise ValueError("not the second time")
        later.touch()
    if "dies" in options:
        os.kill(os.getpid(), 11)
    if "sleeps" in options:
        Path(options["sleeps"]).touch()
        time.sleep(3600)
    if "then_sleeps" in options:
        # A file: the first start goes well, the second one hangs, the third goes well.
        starts = Path(options["then_sleeps"])
        starts.write_text(starts.read_text() + "." if starts.exists() else ".")
        if len(starts.read_text()) == 2:
            time.sleep(3600)
    return FakeEngine(options.get("rank", 0))
