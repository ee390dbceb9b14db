"""Fills a store in the background, from a bounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import torch

from sglang_epd.wire.messages import Layout

logger = logging.getLogger(__name__)


class Writing:
    """Embeddings that are to be written, and the task that does it, one after the other.

    Args:
        write: writes one of so many bytes; raises nothing.
        drop: called with the bytes of each dropped embedding.
        capacity_bytes: embeddings that may wait or be on their way.
    """

    def __init__(
        self,
        write: Callable[[int, bytes, Layout, torch.Tensor], Awaitable[None]],
        drop: Callable[[int], None],
        capacity_bytes: int,
    ) -> None:
        self._write = write
        self._drop = drop
        self._capacity_bytes = capacity_bytes
        self._queue: dict[bytes, tuple[Layout, torch.Tensor, int]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.nbytes = 0

    @property
    def items(self) -> int:
        return len(self._queue)

    def put(self, key: bytes, layout: Layout, embedding: torch.Tensor, nbytes: int) -> None:
        """Write an embedding by and by; it must not change meanwhile."""
        if key in self._queue:
            return
        if self._closed or self.nbytes + nbytes > self._capacity_bytes:
            self._drop(nbytes)
            return
        self._queue[key] = layout, embedding, nbytes
        self.nbytes += nbytes
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all(), name="store writer")

    async def close(self, grace_s: float) -> None:
        """Give queued writes that long to be written; drop the rest."""
        self._closed = True
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=grace_s)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self._queue:
            logger.warning("%d writes to the store were given up", len(self._queue))
        for _, _, nbytes in self._queue.values():
            self._drop(nbytes)
        self._queue.clear()
        self.nbytes = 0

    async def _write_all(self) -> None:
        while self._queue:
            key, (layout, embedding, nbytes) = next(iter(self._queue.items()))
            await self._write(nbytes, key, layout, embedding)
            del self._queue[key]
            self.nbytes -= nbytes
