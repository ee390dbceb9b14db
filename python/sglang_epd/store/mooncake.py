"""Mooncake Store: embeddings in the memory of a cluster, found by a master.

Objects lie in segments of memory that clients give, and end with their client. So an encoder
gives none unless `segment_mb` says so, and storage nodes give the room
(`python -m mooncake.mooncake_store_service`, `mooncake_client`). A full master evicts the
least recently used objects. It knows no time to live; `ttl_s` is judged by the reader. `put`
of a key that is there changes nothing.

The library blocks, up to half a minute where a peer hangs.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_epd.errors import ConfigError
from sglang_epd.store.backend import OversizedError, StoreError, Threads
from sglang_epd.store.url import MooncakeOptions, StoreUrl
from sglang_epd.wire.urls import host_port

_THREADS = 4
_MASTER_S = 1.0
# Of `get_size` and `remove`: an object that is being written, and one that is not there.
_NOT_FOUND = (-703, -704)
# The library rounds up what it takes of its buffer.
_BUFFER_SHARE = 1.25


class MooncakeStore:
    """A `StoreBackend`.

    Raises:
        ConfigError: Mooncake is not installed.
    """

    def __init__(self, url: StoreUrl) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                'The store is a Mooncake Store: pip install ".[mooncake]" in a clone '
                "of sglang-epd (mooncake-cpu without CUDA)"
            ) from error
        self._make = MooncakeDistributedStore
        self._url = url
        self._client: Any = None
        self._connecting: asyncio.Task[None] | None = None
        self._threads = Threads("store mooncake", _THREADS)
        # A thread of its own: set-up may take long, and reads would wait behind it.
        self._setup_thread = Threads("store mooncake setup", 1)

    async def connect(self) -> None:
        if self._client is not None:
            return
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_look_at)
        # A caller that is cancelled does not end the set-up.
        await asyncio.shield(self._connecting)

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        await self.connect()
        return await self._threads.run(lambda: self._read(self._name(name), max_bytes))

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        await self.connect()
        await self._call("put", lambda: self._client.put_parts(self._name(name), *pieces))

    async def remove(self, name: str) -> None:
        await self.connect()
        # By force: an object that was just read is leased.
        await self._call("remove", lambda: self._client.remove(self._name(name), True))

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        # Not while a call hangs, which would go on in freed memory.
        if self._client is not None and not self._threads.busy:
            await self._threads.run(self._client.close)
        self._threads.close()
        self._setup_thread.close()

    async def _connect(self) -> None:
        self._client = await self._setup_thread.run(self._setup)

    def _name(self, name: str) -> str:
        return f"{self._url.bounds.namespace}/{name}"

    def _setup(self) -> Any:
        url, options = self._url, self._url.bounds
        assert isinstance(options, MooncakeOptions)
        # The library would try twenty times, for a minute and a half.
        try:
            with socket.create_connection((url.host, url.port), _MASTER_S) as probe:
                local = options.host or probe.getsockname()[0]
        except OSError as error:
            raise StoreError(f"its master is not there: {error.strerror or error}") from error
        client = self._make()
        # Each thread may have one embedding in it. Over TCP memory is taken when it is used.
        buffer_bytes = int(_THREADS * url.max_item_bytes * _BUFFER_SHARE)
        code = client.setup(
            local,
            options.metadata,
            options.segment_mb << 20,
            buffer_bytes,
            options.protocol,
            options.device,
            host_port(url.host, url.port),
            **({"tenant_id": options.tenant} if options.tenant else {}),
        )
        if code:
            raise StoreError(f"Mooncake's setup answers {code}")
        return client

    def _read(self, name: str, max_bytes: int) -> np.ndarray | None:
        size = self._client.get_size(name)
        if size in _NOT_FOUND:
            return None
        if size < 0:
            raise StoreError(f"Mooncake's get_size answers {size}")
        if size > max_bytes:
            raise OversizedError(f"{name} has {size} bytes")
        handle = self._client.get_buffer(name)
        if handle is None:
            raise StoreError("Mooncake has the object, and does not give it")
        return np.frombuffer(handle, dtype=np.uint8).copy()

    async def _call(self, what: str, call: Callable[[], int]) -> None:
        code = await self._threads.run(call)
        if code not in (0, *_NOT_FOUND):
            raise StoreError(f"Mooncake's {what} answers {code}")


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve the error, or asyncio would report it where no caller is left."""
    if not task.cancelled():
        task.exception()
