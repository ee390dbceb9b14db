"""What a store has to be able to do; `folder`, `redis` and `mooncake` are three.

A backend moves bytes by name and says what went wrong. Whether it is asked at all, how
long it may take and what becomes of its answers is `shared`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class StoreError(Exception):
    """The store cannot be reached, is full, or refuses."""


class OversizedError(StoreError):
    """Under that name lies more than may be read."""


class Backend(Protocol):
    """Bytes by name. Every call may be cancelled, and may be made again."""

    async def connect(self) -> None:
        """Be ready to be asked; whether it was called or not, other calls see to it.

        Raises:
            StoreError: it cannot be reached now.
        """

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        """The bytes under a name (uint8, one dimension, memory of their own), or None.

        Raises:
            OversizedError: more than `max_bytes`; what lies there was not read.
            StoreError: see there.
        """

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Keep the pieces, one after the other, under a name: all of them or nothing.

        Raises:
            StoreError: see there.
        """

    async def remove(self, name: str) -> None:
        """Forget what is under a name, if there is anything.

        Raises:
            StoreError: see there.
        """

    async def close(self) -> None:
        """Let go of connections; what is going on ends by itself."""
