"""The contract of a store; `folder`, `redis` and `mooncake` implement it.

A backend moves bytes by name and reports failures. Whether it is asked at all, and how
long it may take, is `breaker`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class StoreError(Exception):
    """The store cannot be reached, is full, or refuses.

    Attributes:
        outcome: how metrics call a read or a write that ends so.
    """

    outcome = "error"


class OversizedError(StoreError):
    """Under that name lies more than may be read."""

    outcome = "too_large"


class Backend(Protocol):
    """Bytes by name. Every call may be cancelled, may be made again, and raises StoreError."""

    async def connect(self) -> None:
        """Be ready to be asked; other calls connect by themselves."""

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        """The bytes under a name (uint8, one dimension, memory of their own), or None.

        Raises:
            OversizedError: more than `max_bytes`, which were not read.
        """

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Keep the pieces, one after the other, under a name: all of them or nothing.

        Args:
            pieces: bytes of one entry, in order; they do not change before the call ends.
        """

    async def remove(self, name: str) -> None:
        """Remove the entry of a name, if there is one."""

    async def close(self) -> None:
        """Let go of connections; calls in flight end by themselves."""
