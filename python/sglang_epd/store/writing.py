"""Fills a store in the background: a bounded queue, and two writers.

A key has its writer, so that a corrupt entry is removed before it is written anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_epd.errors import ProtocolError
from sglang_epd.store.backend import Backend, StoreError
from sglang_epd.store.calls import Calls, LeftAloneError
from sglang_epd.store.entry import Sealer
from sglang_epd.store.threads import Threads
from sglang_epd.wire.messages import Layout

logger = logging.getLogger(__name__)

_WRITERS = 2
# One write, or one removal.
_CALL_S = 10.0
# Removals need no memory, but a place.
_MAX_JOBS = 4096

# Told of each write: how it ended, seconds, bytes.
Observer = Callable[[str, float, int], None]


@dataclass
class _Job:
    key: bytes
    removal: bool = False
    layout: Layout | None = None
    embedding: torch.Tensor | None = None
    nbytes: int = 0


class Writing:
    """What is to be written, and who writes it.

    Args:
        capacity_bytes: embeddings that may wait or be on their way.
        name_of: what a key is called in the store.
        observer: see there; "written", "error", "timeout", "skipped" (the breaker is
            open), "dropped" (the queue is full, or the server ends), "removed".
    """

    def __init__(
        self,
        backend: Backend,
        calls: Calls,
        sealer: Sealer,
        threads: Threads,
        *,
        capacity_bytes: int,
        name_of: Callable[[bytes], str],
        observer: Observer,
    ) -> None:
        self._backend = backend
        self._calls = calls
        self._sealer = sealer
        self._threads = threads
        self._capacity_bytes = capacity_bytes
        self._name_of = name_of
        self._observe = observer
        self._queues: list[dict[bytes, _Job]] = [{} for _ in range(_WRITERS)]
        self._wanted = [asyncio.Event() for _ in range(_WRITERS)]
        self._writers: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.items = 0
        self.nbytes = 0

    def put(self, key: bytes, layout: Layout, embedding: torch.Tensor, nbytes: int) -> None:
        """Write an embedding by and by; it must not change meanwhile."""
        if self.nbytes + nbytes > self._capacity_bytes:
            self._observe("dropped", 0.0, nbytes)
            return
        job = self._job(key)
        if job is None or job.embedding is not None:
            return
        job.layout, job.embedding, job.nbytes = layout, embedding, nbytes
        self.nbytes += nbytes

    def remove(self, key: bytes) -> None:
        """Remove an entry by and by."""
        job = self._job(key)
        if job is not None:
            job.removal = True

    async def close(self, grace_s: float) -> None:
        """Give what waits that long to be written; the rest is dropped."""
        self._closed = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d writes to the store were given up", self.items)
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)
        for queue in self._queues:
            for job in queue.values():
                if job.embedding is not None:
                    self._observe("dropped", 0.0, job.nbytes)
            queue.clear()
        self.items = self.nbytes = 0
        self._idle.set()

    def _job(self, key: bytes) -> _Job | None:
        """The job of a key that waits, or a new one; None if there is no place."""
        index = key[0] % _WRITERS
        job = self._queues[index].get(key)
        if job is not None:
            return job
        if self._closed or self.items >= _MAX_JOBS:
            self._observe("dropped", 0.0, 0)
            return None
        if not self._writers:
            self._writers = [asyncio.create_task(self._write_all(n)) for n in range(_WRITERS)]
        self.items += 1
        self._idle.clear()
        self._wanted[index].set()
        return self._queues[index].setdefault(key, _Job(key))

    async def _write_all(self, index: int) -> None:
        queue, wanted = self._queues[index], self._wanted[index]
        while True:
            await wanted.wait()
            if not queue:
                wanted.clear()
                continue
            job = queue.pop(next(iter(queue)))
            try:
                await self._do(job)
            finally:
                self.items -= 1
                self.nbytes -= job.nbytes
                if not self.items:
                    self._idle.set()
            # Or the last embedding would stay until there is another.
            del job

    async def _do(self, job: _Job) -> None:
        began = time.perf_counter()
        outcome = "dropped"
        until = asyncio.get_running_loop().time() + _CALL_S
        name = self._name_of(job.key)
        try:
            if self._calls.breaker.blocks(time.monotonic()):
                # Before all of it is read for its digest.
                raise LeftAloneError
            if job.removal:
                await self._calls.ask(self._backend.remove(name), until)
                outcome = "removed"
            if job.layout is not None and job.embedding is not None:
                layout, embedding = job.layout, job.embedding
                pieces = await self._threads.run(
                    lambda: self._sealer.seal(job.key, layout, embedding, time.time())
                )
                await self._calls.ask(self._backend.put(name, pieces), until)
                outcome = "written"
        except LeftAloneError:
            outcome = "skipped"
        except TimeoutError:
            outcome = "timeout"
        except (StoreError, ProtocolError) as error:
            outcome = "error"
            logger.debug("Not written: %s", error)
        except Exception:
            outcome = "error"
            logger.exception("An embedding could not be written to the store")
        finally:
            self._observe(outcome, time.perf_counter() - began, job.nbytes)
