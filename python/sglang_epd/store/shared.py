"""A store as the encoder sees it: best effort, and never an error.

It is asked before an embedding is made, and filled behind it. What is slow, full, corrupt
or gone is a miss: a breaker leaves a store alone that fails again and again, and no
answer is waited for longer than one bound, waiting for one's turn included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Protocol

import torch

from sglang_epd.errors import ConfigError
from sglang_epd.store.backend import Backend, OversizedError, StoreError
from sglang_epd.store.breaker import Breaker
from sglang_epd.store.calls import Calls, LeftAloneError
from sglang_epd.store.entry import MAX_OVERHEAD_BYTES, CorruptEntryError, Entry, Sealer
from sglang_epd.store.threads import Threads
from sglang_epd.store.url import StoreUrl
from sglang_epd.store.writing import Writing
from sglang_epd.wire.messages import Layout
from sglang_epd.wire.tensors import spec_bytes

logger = logging.getLogger(__name__)

# What is read at a time; each may take `max_item_bytes`.
_READS = 8
_CONNECT_S = 5.0
# When the server ends.
_LAST_WRITES_S = 1.5
_LAST_WORDS_S = 0.5
# Digests of what is read and written.
_HASHERS = 2


class _BusyError(Exception):
    """It had no time to be asked."""


class _ExpiredError(Exception):
    """The entry is older than what is still used."""


# What a read that brings nothing is called; the first that fits.
_OUTCOMES: dict[type[Exception], str] = {
    LeftAloneError: "skipped",
    OversizedError: "too_large",
    StoreError: "error",
    TimeoutError: "timeout",
    CorruptEntryError: "corrupt",
    _BusyError: "busy",
    _ExpiredError: "expired",
}
_UNUSABLE = ("corrupt", "expired")


class Observer(Protocol):
    """Counts what happens; outcomes are of bounded sets."""

    def read(self, outcome: str, seconds: float, nbytes: int) -> None:
        """An embedding was asked for: "hit", "miss", "expired", "corrupt", "too_large",
        "error", "timeout", "busy" (others were asked for), "skipped" (the breaker is
        open)."""

    def wrote(self, outcome: str, seconds: float, nbytes: int) -> None:
        """An embedding was to be written: "written", "error", "timeout", "skipped",
        "dropped" (the queue is full, or the server ends), "too_large"; or an entry was
        "removed"."""


class SharedStore:
    """Embeddings by key, beyond this process.

    Args:
        backend: where they lie.
        url: within which bounds.
        token: keys the entries' digests; empty for none.
        timeout_s: how long `find` may take.
        observer: see there.
    """

    def __init__(
        self, backend: Backend, url: StoreUrl, *, token: str, timeout_s: float, observer: Observer
    ) -> None:
        self._backend = backend
        self._url = url
        self._timeout_s = timeout_s
        self._observer = observer
        self._sealer = Sealer(token)
        self._hashing = Threads("store digests", _HASHERS)
        self._slots = asyncio.Semaphore(_READS)
        self._reads = Calls("reads", Breaker())
        self._writes = Calls("writes", Breaker())
        self._max_bytes = url.max_item_bytes + MAX_OVERHEAD_BYTES
        self._counts: Counter[str] = Counter()
        self._writing = Writing(
            backend,
            self._writes,
            self._sealer,
            self._hashing,
            capacity_bytes=url.queue_bytes,
            name_of=self._name,
            observer=self._wrote,
        )

    async def connect(self) -> None:
        """Let it be there for the first who asks, if that takes no more than seconds."""
        until = asyncio.get_running_loop().time() + _CONNECT_S
        try:
            await self._reads.ask(self._backend.connect(), until)
        except TimeoutError:
            logger.warning("The store %s does not answer yet", self._url.shown)
        except StoreError as error:
            logger.warning("The store %s cannot be used yet: %s", self._url.shown, error)
        else:
            logger.info("Embeddings are kept in %s, too", self._url.shown)

    async def find(self, key: bytes, modality: str) -> Entry | None:
        """The embedding of a key, if the store has it and gives it in time."""
        began = time.perf_counter()
        outcome, entry = "error", None
        try:
            entry = await self._read(key, modality)
            outcome = "miss" if entry is None else "hit"
        except tuple(_OUTCOMES) as error:
            outcome = next(name for kind, name in _OUTCOMES.items() if isinstance(error, kind))
            if outcome in _UNUSABLE:
                logger.info("An entry of the store is removed: %s (%s)", error, outcome)
                self._writing.remove(key)
        except Exception:
            # Whatever lies in a store, no request may end of it.
            logger.exception("An entry of the store could not be read")
        finally:
            nbytes = entry.nbytes if entry is not None else 0
            self._counts[f"reads_{outcome}"] += 1
            self._observer.read(outcome, time.perf_counter() - began, nbytes)
        return entry

    def keep(self, key: bytes, layout: Layout, embedding: torch.Tensor) -> None:
        """Put an embedding there by and by; it must not change meanwhile."""
        nbytes = spec_bytes(layout.embedding)
        if nbytes > self._url.max_item_bytes:
            self._wrote("too_large", 0.0, nbytes)
        else:
            self._writing.put(key, layout, embedding, nbytes)

    @property
    def readable(self) -> bool:
        """Whether it is worth asking: it is not being left alone."""
        return not self._reads.breaker.blocks(time.monotonic())

    @property
    def breakers(self) -> dict[str, Breaker]:
        return {"reads": self._reads.breaker, "writes": self._writes.breaker}

    @property
    def queued_bytes(self) -> int:
        return self._writing.nbytes

    def status(self) -> dict[str, Any]:
        """For people: how it does, and what came of it so far; not where it is."""
        return {
            "kind": self._url.kind,
            "breakers": {name: breaker.state.value for name, breaker in self.breakers.items()},
            "queued": self._writing.items,
            "queued_bytes": self._writing.nbytes,
            **dict(sorted(self._counts.items())),
        }

    async def close(self) -> None:
        """Give what waits to be written a moment; takes two seconds at most."""
        await self._writing.close(_LAST_WRITES_S)
        self._hashing.close()
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._backend.close()
        except TimeoutError:
            logger.info("The store's library did not end in time")
        except Exception:
            logger.exception("The store's library did not end well")

    async def _read(self, key: bytes, modality: str) -> Entry | None:
        """The entry, or an error of those that have a name as an outcome."""
        now = asyncio.get_running_loop().time()
        until = now + self._timeout_s
        try:
            # Who waits longer for his turn would leave the store no time to answer in.
            async with asyncio.timeout_at(now + self._timeout_s / 2):
                await self._slots.acquire()
        except TimeoutError:
            raise _BusyError from None
        try:
            call = self._backend.get(self._name(key), self._max_bytes)
            raw = await self._reads.ask(call, until)
            if raw is None:
                return None
            async with asyncio.timeout_at(until):
                entry = await self._hashing.run(lambda: self._sealer.open(key, modality, raw))
        finally:
            self._slots.release()
        if time.time() - entry.written_at > self._url.ttl_s:
            raise _ExpiredError("too old")
        return entry

    def _name(self, key: bytes) -> str:
        return f"{self._sealer.folder}/{key.hex()}"

    def _wrote(self, outcome: str, seconds: float, nbytes: int) -> None:
        self._counts[f"writes_{outcome}"] += 1
        self._observer.wrote(outcome, seconds, nbytes)


def open_store(typed: str, *, token: str, timeout_s: float, observer: Observer) -> SharedStore:
    """The store that `SGLANG_EPD_STORE` names; nothing is asked of it yet.

    Raises:
        ConfigError: the setting cannot be honoured, or a library is missing.
    """
    url = StoreUrl.parse(typed)
    return SharedStore(_backend(url), url, token=token, timeout_s=timeout_s, observer=observer)


def _backend(url: StoreUrl) -> Backend:
    if url.kind == "file":
        from sglang_epd.store.folder import FolderStore

        return FolderStore(url.folder / url.namespace, url.max_bytes, url.ttl_s)
    if url.kind == "redis":
        from sglang_epd.store.redis import RedisStore

        return RedisStore(url)
    if url.kind == "mooncake":
        from sglang_epd.store.mooncake import MooncakeStore

        return MooncakeStore(url)
    raise ConfigError(f"there is no store of the kind {url.kind}")
