"""A store as the encoder sees it: best effort, and never an error.

An encoder asks it before it computes an embedding, and fills it afterwards. A store that is
slow, full, corrupt or gone is a miss: a breaker leaves a failing store alone, and a lookup
takes no longer than one bound, its wait for a turn included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

from sglang_epd.errors import ProtocolError
from sglang_epd.store.backend import Breaker, StoreBackend, StoreError, Threads
from sglang_epd.store.entry import MAX_OVERHEAD_BYTES, CorruptEntryError, Sealer, StoredEntry
from sglang_epd.store.url import FolderBounds, StoreUrl
from sglang_epd.wire.messages import Layout
from sglang_epd.wire.tensors import spec_bytes

logger = logging.getLogger(__name__)

# Called for each lookup and write: "read" or "write", its outcome, seconds.
Observer = Callable[[str, str, float], None]

# Reads at a time; each may take `max_item_bytes`.
_READS = 8
_CONNECT_S = 5.0
_WRITE_S = 10.0
# When the server ends.
_LAST_WRITES_S = 1.5
_LAST_WORDS_S = 0.5
# Digests of entries that are read and written.
_HASHERS = 2


class _BusyError(StoreError):
    """Other lookups took too long for this one to get a turn."""

    outcome = "busy"


class _ExpiredError(StoreError):
    """The entry is older than `ttl_s`."""

    outcome = "expired"


class SharedStore:
    """Embeddings by key, beyond this process.

    Args:
        backend: where they lie.
        url: within which bounds.
        token: keys the entries' digests; empty for none.
        timeout_s: how long `find` may take.
        observer: counts lookups and writes.
    """

    def __init__(
        self,
        backend: StoreBackend,
        url: StoreUrl,
        *,
        token: str,
        timeout_s: float,
        observer: Observer,
    ) -> None:
        self._backend = backend
        self._url = url
        self._timeout_s = timeout_s
        self._observer = observer
        self._sealer = Sealer(token)
        self._hashing = Threads("store digests", _HASHERS)
        self._slots = asyncio.Semaphore(_READS)
        self._reads, self._writes = Breaker("reads"), Breaker("writes")
        self._counts: Counter[str] = Counter()
        self._writing = Writing(
            lambda *what: self._count_write("written", self._put(*what)),
            lambda: self._count("write", "dropped", 0.0),
            url.bounds.queue_mb << 20,
        )

    async def connect(self) -> None:
        """Connect early, so that the first lookup need not; wait for some seconds at most."""
        try:
            await self._reads.ask(self._backend.connect(), _CONNECT_S)
        except TimeoutError:
            logger.warning("The store %s does not answer yet", self._url.shown)
        except StoreError as error:
            logger.warning("The store %s cannot be used yet: %s", self._url.shown, error)
        else:
            logger.info("Embeddings are kept in %s, too", self._url.shown)

    async def find(self, key: bytes, modality: str) -> StoredEntry | None:
        """The embedding of a key; None where the store has none, or does not give it in time.

        Args:
            key: of the embedding, 32 bytes.
            modality: that the layout must have.
        """
        began = time.monotonic()
        outcome, entry = "error", None
        try:
            entry = await self._read(key, modality, began + self._timeout_s)
            outcome = "miss" if entry is None else "hit"
        except Exception as error:
            # No request may fail because of its store.
            outcome = _outcome(error)
        finally:
            self._count("read", outcome, time.monotonic() - began)
        return entry

    def keep(self, key: bytes, layout: Layout, embedding: torch.Tensor) -> None:
        """Queue an embedding to be written.

        Args:
            embedding: [tokens, width], on the host; it must not change meanwhile.
        """
        nbytes = spec_bytes(layout.embedding)
        if nbytes > self._url.max_item_bytes:
            self._count("write", "too_large", 0.0)
        else:
            self._writing.put(key, layout, embedding, nbytes)

    @property
    def readable(self) -> bool:
        """Whether it is worth asking: it is not being left alone."""
        return not self._reads.blocks

    @property
    def breakers(self) -> dict[str, Breaker]:
        return {"reads": self._reads, "writes": self._writes}

    def status(self) -> dict[str, Any]:
        """For people: its state and its counts so far, without its address."""
        return {
            "kind": self._url.kind,
            "breakers": {name: breaker.state.value for name, breaker in self.breakers.items()},
            "queued": self._writing.items,
            "queued_bytes": self._writing.nbytes,
            **dict(sorted(self._counts.items())),
        }

    async def close(self) -> None:
        """Give queued writes a moment; takes two seconds at most."""
        await self._writing.close(_LAST_WRITES_S)
        self._hashing.close()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._backend.close()
        except TimeoutError:
            logger.info("The store's library did not end in time")
        except Exception:
            logger.exception("The store's library did not end well")

    async def _read(self, key: bytes, modality: str, until: float) -> StoredEntry | None:
        """The entry, or None.

        Raises:
            StoreError, TimeoutError: why there is none.
        """
        try:
            # A longer wait for its turn would leave the store no time to answer in.
            async with asyncio.timeout(self._timeout_s / 2):
                await self._slots.acquire()
        except TimeoutError:
            raise _BusyError from None
        try:
            name = self._name(key)
            call = self._backend.get(name, self._url.max_item_bytes + MAX_OVERHEAD_BYTES)
            raw = await self._reads.ask(call, until - time.monotonic())
            if raw is None:
                return None
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    entry = await self._hashing.run(lambda: self._sealer.open(key, modality, raw))
                if time.time() - entry.written_at > self._url.bounds.ttl_s:
                    raise _ExpiredError("too old")
            except (CorruptEntryError, _ExpiredError) as error:
                logger.info("An entry of the store is removed: %s (%s)", error, error.outcome)
                # A later `put` might not replace it.
                removal = self._writes.ask(self._backend.remove(name), until - time.monotonic())
                await self._count_write("removed", removal)
                raise
            return entry
        finally:
            self._slots.release()

    async def _put(self, key: bytes, layout: Layout, embedding: torch.Tensor) -> None:
        seal = partial(self._sealer.seal, key, layout, embedding, time.time())
        pieces = await self._hashing.run(seal)
        await self._writes.ask(self._backend.put(self._name(key), pieces), _WRITE_S)

    async def _count_write(self, done: str, write: Awaitable[None]) -> None:
        began = time.monotonic()
        outcome = done
        try:
            await write
        except Exception as error:
            outcome = _outcome(error)
        self._count("write", outcome, time.monotonic() - began)

    def _name(self, key: bytes) -> str:
        return f"{self._sealer.folder}/{key.hex()}"

    def _count(self, direction: str, outcome: str, seconds: float) -> None:
        self._counts[f"{direction}s_{outcome}"] += 1
        self._observer(direction, outcome, seconds)


def _outcome(error: Exception) -> str:
    """The name that metrics give to an error."""
    if isinstance(error, StoreError):
        return error.outcome
    if isinstance(error, TimeoutError):
        return "timeout"
    if not isinstance(error, ProtocolError):
        logger.error("A lookup or write of the store failed", exc_info=error)
    return "error"


def open_store(typed: str, *, token: str, timeout_s: float, observer: Observer) -> SharedStore:
    """The store that `SGLANG_EPD_STORE` names; nothing is asked of it yet.

    Args:
        typed: the setting.
        token: entries carry a digest keyed by it; empty for none.
        timeout_s: of a lookup.
        observer: called after each lookup and write.

    Raises:
        ConfigError: the setting cannot be honoured, or a library is missing.
    """
    url = StoreUrl.parse(typed)
    return SharedStore(_backend(url), url, token=token, timeout_s=timeout_s, observer=observer)


def _backend(url: StoreUrl) -> StoreBackend:
    if isinstance(url.bounds, FolderBounds):
        from sglang_epd.store.folder import FolderStore

        root = url.folder / url.bounds.namespace
        return FolderStore(root, url.bounds.max_mb << 20, url.bounds.ttl_s)
    from sglang_epd.store.mooncake import MooncakeStore

    return MooncakeStore(url)


class Writing:
    """Embeddings that are to be written, and the task that does it, one after the other.

    Args:
        write: writes one; raises nothing.
        drop: called for each dropped embedding.
        capacity_bytes: embeddings that may wait or be on their way.
    """

    def __init__(
        self,
        write: Callable[[bytes, Layout, torch.Tensor], Awaitable[None]],
        drop: Callable[[], None],
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
            self._drop()
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
        for _ in self._queue:
            self._drop()
        self._queue.clear()
        self.nbytes = 0

    async def _write_all(self) -> None:
        while self._queue:
            key, (layout, embedding, nbytes) = next(iter(self._queue.items()))
            await self._write(key, layout, embedding)
            del self._queue[key]
            self.nbytes -= nbytes
