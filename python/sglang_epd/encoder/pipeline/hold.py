"""What an asker holds: its interest in one embedding, and what has come of it.

Every change is made by `computations`, which made it; the asker waits, reads, and says
whether it wants the embedding now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch

from sglang_epd.cache import Entry
from sglang_epd.encoder.pipeline.scheduling import Job
from sglang_epd.encoder.pipeline.work import Stage, Work
from sglang_epd.wire.messages import Layout

if TYPE_CHECKING:
    from sglang_epd.encoder.pipeline.computations import Computations


class MediaNeededError(Exception):
    """An embedding that was asked for without media is not in the store, or has gone since.

    Whoever asked asks again, with the media: it goes no further.
    """


class Hold:
    """One asker's interest in an embedding; made by `Computations.hold`.

    Attributes:
        key: of the embedding.
        source: how it comes about: "cached", "coalesced" (with another asker), "stored"
            (it was in the shared store) or "computed".
        ms: milliseconds that it spent in each stage.
        began: when it was asked for, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        computations: Computations,
        key: bytes,
        modality: str,
        data: bytes | None,
        job: Job,
        *,
        looked: bool,
    ) -> None:
        self._computations = computations
        self.key = key
        self._modality = modality
        self._data = data
        self._job = job
        self._looked = looked
        self._wanted = True
        self._over = False
        self._layout: Layout | None = None
        self._work: Work | None = None
        self._entry: Entry | None = None
        self._known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.source = "computed"
        self.ms: dict[str, float] = {}
        self.began = time.perf_counter()
        self._stages: list[list[Stage]] = []

    @property
    def stages(self) -> Iterator[Stage]:
        """What it went through, in its order, as far as it is over."""
        return chain.from_iterable(self._stages)

    def join(self, work: Work) -> None:
        """Its embedding is being made; called by `computations` alone."""
        self._work = work
        work.holds.append(self)
        self._stages.append(work.stages)

    async def layout(self) -> Layout:
        """The embedding's layout, as soon as it is known.

        Raises:
            EpdError: there will be none.
        """
        await asyncio.shield(self._known)
        assert self._layout is not None
        return self._layout

    @property
    def made(self) -> asyncio.Future[None]:
        """Done when the embedding is there, or will not be."""
        return self._done

    async def embedding(self) -> torch.Tensor:
        """The embedding [tokens, width]; stays until the hold is released or unwanted.

        Raises:
            MediaNeededError: ask again, with the media.
            EpdError: there will be none.
        """
        await asyncio.shield(self._done)
        assert self._entry is not None
        return self._entry.embedding

    def want(self, wanted: bool) -> None:
        """Say whether the embedding is of use now.

        Nothing is run for askers who do not want it now, and what they hold may go where
        memory is short; it is made again when one wants it again.
        """
        if wanted != self._wanted and not self._over:
            self._wanted = wanted
            self._computations._want(self)

    def release(self) -> None:
        """Give the interest up; may be called again."""
        if not self._over:
            self._over = True
            self._data = None  # an error that was raised from here may keep the hold
            self._computations._release(self)
