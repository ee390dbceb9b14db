"""A tower over `transformers`' module, and SGLang's own, as the encoder's stages see them.

Both note what each pass took on the device. What is prepared and how many passes are in
flight is as in the encoder server's engine.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image

from gpu.vision import SHAPES, Vision
from sglang_epd.decoding import Decoders
from sglang_epd.device import device_of
from sglang_epd.encoder.model.copyout import CopyOut
from sglang_epd.encoder.tower import Prepared
from sglang_epd.media import MediaLimits
from sglang_epd.wire.messages import Layout, TensorSpec

_MOST_PREPARERS = 32


@dataclass(frozen=True)
class Pass:
    """A forward pass.

    Attributes:
        pictures: in its batch.
        patches: of all of them.
        host_s: seconds that it took to be launched; on a CPU, to run.
        events: CUDA's, before its first kernel and after its last one.
    """

    pictures: int
    patches: int
    host_s: float
    events: tuple[Any, ...]

    @property
    def device_s(self) -> float:
        """Seconds on the device, launches that it had to wait for included; call it when the
        device has nothing to do."""
        return self.events[0].elapsed_time(self.events[1]) / 1e3 if self.events else self.host_s


class Passes(list[Pass]):
    """All passes of a tower, in their order.

    Args:
        cuda: whether they run on CUDA's current stream.
    """

    def __init__(self, cuda: bool) -> None:
        super().__init__()
        self.cuda = cuda

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.cuda:
            torch.cuda.synchronize()

    @contextmanager
    def timed(self, batch: Sequence[Prepared]) -> Iterator[None]:
        """Around a pass, in its thread and on its stream."""
        kinds = 2 if self.cuda else 0
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(kinds))
        began = time.perf_counter()
        for event in events[:1]:
            event.record()
        yield
        for event in events[1:]:
            event.record()
        took_s = time.perf_counter() - began
        self.append(Pass(len(batch), sum(one.patches for one in batch), took_s, events))


class TransformersTower:
    """A tower (`encoder.tower.Tower`) over a `Vision`.

    Args:
        vision: what it runs.
        decoders: decode in children.
        preparers: pictures that are prepared side by side.
        torch_threads: that torch uses for one picture; 0 leaves it as it is.
        depth: passes handed to it at a time.
    """

    alive = True

    def __init__(
        self,
        vision: Vision,
        decoders: Decoders,
        preparers: int,
        torch_threads: int,
        depth: int,
    ) -> None:
        self.preparers = preparers
        self.depth = depth
        self.passes = Passes(vision.device.type == "cuda")
        self._vision = vision
        self._decoders = decoders
        limit = partial(torch.set_num_threads, torch_threads) if torch_threads else None
        self._preparing = ThreadPoolExecutor(preparers, "epd-prepare", limit)
        self._tower = ThreadPoolExecutor(1, "epd-tower")
        self._lander = ThreadPoolExecutor(1, "epd-land")
        device = device_of(vision.device.type)
        self._copies = CopyOut(device) if device.queues else None

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        decoding = self._decoders.begin(deadline)

        def prepare() -> Prepared:
            with decoding:
                return prepared_of(self._vision, *self._vision.prepare(decoding.image(data)))

        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    async def forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        loop = asyncio.get_running_loop()
        rows = [prepared.layout.tokens for prepared in batch]
        if self._copies is None:
            made = await loop.run_in_executor(self._tower, self._run, batch)
            return [part.clone() for part in made.split(rows)]
        launched = await loop.run_in_executor(
            self._tower, self._copies.launch, lambda: self._run(batch)
        )
        return await loop.run_in_executor(self._lander, self._copies.land, launched, rows)

    def discard(self, prepared: Prepared) -> None:
        pass

    def close(self) -> None:
        for pool in (self._preparing, self._tower, self._lander):
            pool.shutdown()

    def _run(self, batch: Sequence[Prepared]) -> torch.Tensor:
        with self.passes.timed(batch):
            return self._vision.run(
                [prepared.content for prepared in batch],
                [prepared.layout.grid for prepared in batch],
            )


class Transformers:
    """Towers over one `Vision`, each with threads of its own.

    Args:
        shape: of it, of SHAPES.
        device: "cuda" or "cpu".
        decode_bytes: for all that is decoded at a time.
    """

    def __init__(self, shape: str, device: str, decode_bytes: int) -> None:
        self._vision = Vision(SHAPES[shape], device)
        self._decoders = Decoders(MediaLimits(), decode_bytes, _MOST_PREPARERS)
        self._decoders.start()
        self._made: TransformersTower | None = None

    @property
    def attention(self) -> str:
        return self._vision.attention

    def tower(self, preparers: int, torch_threads: int, depth: int) -> TransformersTower:
        """A new one; the last one may not be used any more."""
        if self._made is not None:
            self._made.close()
        self._made = TransformersTower(
            self._vision, self._decoders, preparers, torch_threads, depth
        )
        return self._made

    def pin(self, pinned: bool) -> None:
        """Whether patches are pinned from now on."""
        self._vision.pins = pinned and self._vision.device.type == "cuda"

    def prepared(self, data: bytes) -> Prepared:
        """A picture; blocks."""
        picture = Image.open(io.BytesIO(data))
        return prepared_of(self._vision, *self._vision.prepare(picture))

    def on_device(self, prepared: Prepared) -> Prepared:
        """The same picture, its patches on the device."""
        there = prepared.content.to(self._vision.device)
        return Prepared(prepared.layout, prepared.patches, prepared.group, there)

    def run_on_device(self, batch: Sequence[Prepared]) -> None:
        """A pass of what `on_device` gave."""
        self._vision.run([one.content for one in batch], [one.layout.grid for one in batch])

    async def close(self) -> None:
        self._decoders.close()


class ReadyTower:
    """A tower whose pictures are prepared beforehand: what the tower alone makes.

    Args:
        tower: that runs them.
        made: pictures, again and again.
    """

    alive = True

    def __init__(self, tower: Any, made: Sequence[Prepared]) -> None:
        # As many as a batch could want: preparing costs nothing here.
        self.preparers = 1024
        self.depth: int = tower.depth
        self._tower = tower
        self._made = itertools.cycle(made)

    async def prepare(
        self,
        modality: str,
        data: bytes,
        deadline: float = math.inf,
        options: Any = None,
    ) -> Prepared:
        one = next(self._made)
        return Prepared(one.layout, one.patches, one.group, one.content)

    async def forward(self, batch: Sequence[Prepared]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = await self._tower.forward(batch)
        return made

    def discard(self, prepared: Prepared) -> None:
        pass


def prepared_of(vision: Vision, features: torch.Tensor, grid: list[list[int]]) -> Prepared:
    """A picture as the encoder's stages take it."""
    dtype = str(vision.dtype).removeprefix("torch.")
    shape = (len(features) // 4, vision.shape.width)
    layout = Layout("IMAGE", TensorSpec(dtype, shape), grid, {})
    return Prepared(layout, len(features), "IMAGE", features)
