"""Redis, or Valkey: one string an embedding, which the server lets expire.

The server's `maxmemory-policy` decides about a full memory; one that evicts suits best.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np

from sglang_epd.errors import ConfigError
from sglang_epd.store.backend import OversizedError, StoreError
from sglang_epd.store.url import StoreUrl

_CONNECTIONS = 16
_CONNECT_S = 2.0
# Callers have deadlines of their own; this ends calls whose caller has left.
_SOCKET_S = 30.0


class RedisStore:
    """A `StoreBackend`.

    Raises:
        ConfigError: the client library is not installed.
    """

    def __init__(self, url: StoreUrl) -> None:
        try:
            from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ConfigError(
                'SGLANG_EPD_STORE names a Redis server: pip install ".[redis]" in a clone of '
                "sglang-epd"
            ) from error
        pool = BlockingConnectionPool(
            host=url.host,
            port=url.port,
            db=url.database,
            username=url.username or None,
            password=url.password or None,
            max_connections=_CONNECTIONS,
            timeout=_CONNECT_S,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_SOCKET_S,
            # A connection that was kept may have ended with the server before this one.
            retry=Retry(NoBackoff(), 1),
            connection_class=SSLConnection if url.tls else Connection,
        )
        self._redis = Redis.from_pool(pool)
        self._errors = (RedisError, OSError)
        self._prefix = f"{url.bounds.namespace}:"
        self._ttl_ms = url.bounds.ttl_s * 1000

    async def connect(self) -> None:
        await self._answer(self._redis.ping())

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        # One byte more than may be read tells that there is more.
        found = await self._answer(self._redis.getrange(self._prefix + name, 0, max_bytes))
        if not isinstance(found, bytes):
            raise StoreError("Redis answers with something else than bytes")
        if not found:
            return None
        if len(found) > max_bytes:
            raise OversizedError(f"{name} has more than {max_bytes} bytes")
        return np.frombuffer(found, dtype=np.uint8).copy()

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        value = b"".join(pieces)
        await self._answer(self._redis.set(self._prefix + name, value, px=self._ttl_ms))

    async def remove(self, name: str) -> None:
        await self._answer(self._redis.unlink(self._prefix + name))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except self._errors as error:
            raise StoreError(f"{type(error).__name__}: {str(error)[:200]}") from error
