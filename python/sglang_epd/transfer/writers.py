"""How an encoder writes a payload into memory that it was granted: shared, or by an engine.

Writers block; the sender runs them in a thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import OrderedDict

import numpy as np

from sglang_epd.errors import ProtocolError, UnavailableError
from sglang_epd.transfer.arena import Address, Arena
from sglang_epd.transfer.mooncake import MooncakeEngine
from sglang_epd.wire import messages as wire

# Language servers of this machine whose arenas stay mapped.
_MAX_ARENAS = 64
# Through which embeddings go to a remote engine, if the card must know the memory.
STAGING_BYTES = 16 << 20
# To one language server.
WRITES_AT_A_TIME = 4
# A language server that is frozen leaves half of them to others.
STAGING_BUFFERS = 2 * WRITES_AT_A_TIME


class SharedWriter:
    """Copies payloads into arenas of this machine. Safe to use from several threads."""

    def __init__(self) -> None:
        self._arenas: OrderedDict[bytes, Arena] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, landing: wire.Shared, nbytes: int) -> None:
        """Have the pages of a payload's place mapped before the payload is made."""
        # The write meets the same error, and tells of it.
        with contextlib.suppress(OSError, ProtocolError):
            arena = self._arena(landing)
            arena.populate(landing.offset - arena.data_offset, nbytes)

    def prepared(self, landing: wire.Shared, nbytes: int) -> bool:
        """Whether they are, so that `prepare` need not be called."""
        arena = self._arenas.get(landing.seal)
        return arena is not None and arena.populated(landing.offset - arena.data_offset, nbytes)

    def write(self, landing: wire.Shared, payload: np.ndarray) -> None:
        """Copy the payload to its place.

        Args:
            landing: arena and place.
            payload: uint8, one dimension.

        Raises:
            ProtocolError: the file is not an arena, or the place not in it.
            OSError: the arena cannot be mapped.
        """
        arena = self._arena(landing)
        span = arena.span(landing.offset - arena.data_offset, len(payload))
        np.copyto(span, payload)

    def forget_gone(self) -> None:
        """Let go of the memory of receivers that have ended: mapped, it would stay."""
        with self._lock:
            self._forget_gone()

    def _arena(self, landing: wire.Shared) -> Arena:
        with self._lock:
            arena = self._arenas.get(landing.seal)
            if arena is None:
                self._forget_gone()
                arena = Arena.open(Address(landing.path, landing.size, landing.seal))
                self._arenas[landing.seal] = arena
            self._arenas.move_to_end(landing.seal)
            while len(self._arenas) > _MAX_ARENAS:
                self._arenas.popitem(last=False)
            return arena

    def _forget_gone(self) -> None:
        for seal, arena in list(self._arenas.items()):
            if not os.path.lexists(arena.address.path):
                del self._arenas[seal]


class RemoteWriter:
    """Writes payloads through a transfer engine. Safe to use from several threads.

    Args:
        engine: does the writing.
        buffers, nbytes: memory that is registered once, for an engine that sends from such.
    """

    def __init__(
        self,
        engine: MooncakeEngine,
        *,
        buffers: int = STAGING_BUFFERS,
        nbytes: int = STAGING_BYTES,
    ) -> None:
        self._engine = engine
        self.engine_name = engine.name
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(buffers if engine.staged else 0):
            buffer = np.zeros(nbytes, dtype=np.uint8)
            engine.register(int(buffer.ctypes.data), nbytes)
            self._free.put(buffer)

    def write(self, landing: wire.Remote, payload: np.ndarray, timeout_s: float) -> None:
        """Write the payload to its place.

        Args:
            landing: session and address.
            payload: uint8, one dimension.

        Raises:
            UnavailableError: it was not written; part of it may yet be.
        """
        if self._engine.staged:
            self._write_staged(landing, payload, time.monotonic() + timeout_s)
            return
        source, size = int(payload.ctypes.data), len(payload)
        self._engine.write(landing.session, source, landing.address, size, timeout_s, keep=payload)

    def _write_staged(self, landing: wire.Remote, payload: np.ndarray, deadline: float) -> None:
        # Without a buffer: it may take a minute where the peer's host is gone.
        self._engine.contact(landing.session, deadline)
        try:
            buffer = self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise UnavailableError("no staging memory became free in time") from None
        try:
            for begin in range(0, len(payload), len(buffer)):
                piece = payload[begin : begin + len(buffer)]
                np.copyto(buffer[: len(piece)], piece)
                self._engine.write(
                    landing.session,
                    int(buffer.ctypes.data),
                    landing.address + begin,
                    len(piece),
                    deadline - time.monotonic(),
                )
        finally:
            # After a write that timed out the engine may still read it. The receiver keeps the
            # memory that it then writes to in quarantine.
            self._free.put(buffer)
