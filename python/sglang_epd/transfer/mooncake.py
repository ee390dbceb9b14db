"""One-sided writes into another process's memory, by Mooncake's transfer engine.

A receiver registers a buffer and tells its `session` and an address to an encoder that may
write there; the encoder writes. Over TCP a write that returns has been applied at the other
end: the receiver acknowledges the last byte. Over RDMA the NIC has.

Mooncake checks that a write falls within registered memory of the receiver, and nothing
else: it asks for no secret, and its ports listen on every interface, so that any peer that
reaches them may write there, and read. The layers above decide
which peer holds an address, and what becomes of memory under an unfinished write.

Measured with mooncake-transfer-engine 0.3.13:

- `transfer_sync_write` spins on a core until the transfer has ended, 30 s at the least
  (`MC_TRANSFER_TIMEOUT`; less than 5 is read as 5). Here the transfer is submitted and
  its status polled, with any deadline and a core less.
- The first transfer to a session asks the peer for its segments under a lock that every
  other transfer of the engine needs too, and a frozen peer holds it for 60 s. A probe
  takes no lock, so the first write to a session sends one and waits beside it.
- A failed submit is answered with 0, and asking for the status of 0 is a segfault.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from sglang_epd.errors import ConfigError, UnavailableError
from sglang_epd.wire.urls import host_port

logger = logging.getLogger(__name__)

# `transfer_submit_write` returns one of these where it failed: 0, or -1 as an unsigned number.
_NOT_SUBMITTED = (0, -1, 2**64 - 1)
_UNDER_WAY = 0
_COMPLETED = 1
_FAILED = -1
# The error of a probe that raised.
_NO_PROBE = -1
# Pauses between two looks at a transfer: a sixteenth of the time it has taken, within
# these. A look costs some microseconds; a pause too long is added to the transfer.
_SHORTEST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 2e-3


def started(backend: str) -> MooncakeEngine | None:
    """The engine that SGLang has in this process, for prefill-decode disaggregation or this.

    Args:
        backend: of `--encoder-transfer-backend`; None is returned where it is another.

    Raises:
        ConfigError: SGLang has none.
    """
    if backend != MooncakeEngine.name:
        return None
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as theirs
    from sglang.srt.runtime_context import get_device

    # Starts it where a process runs no model.
    theirs.maybe_init_shared_mooncake_transfer_engine(gpu_id=get_device().base_gpu_id)
    shared = theirs.get_mooncake_transfer_engine()
    if shared is None:
        raise ConfigError("--encoder-transfer-backend mooncake: SGLang has started no engine")
    return MooncakeEngine(shared.hostname, shared.engine)


class MooncakeEngine:
    """The transfer engine that this process shares with SGLang.

    All methods may be called from any thread.

    Args:
        hostname: address at which peers reach this host. It is published, not bound to.
        engine: an initialised `mooncake.engine.TransferEngine`.
    """

    name = "mooncake"

    def __init__(self, hostname: str, engine: Any) -> None:
        self._engine = engine
        # That a peer passes to `write`: "host:port", with brackets around IPv6.
        self.session = host_port(hostname, engine.get_rpc_port())
        self._lock = threading.Lock()
        # First contact with each session: its probe's result, 0 if it answers.
        self._contacts: dict[str, Future[int]] = {}
        # Transfers that outlived their write's deadline, with the owners of their source.
        self._unfinished: dict[int, object] = {}

    @property
    def staged(self) -> bool:
        """TCP reads from anywhere."""
        return os.environ.get("MC_FORCE_TCP") != "1"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to this memory, and read it. RDMA needs it for sources too.

        Raises:
            ConfigError: refused, because it overlaps what is registered or, with RDMA,
                because memory cannot be locked.
        """
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            raise ConfigError(
                f"Mooncake does not register {nbytes} bytes (code {code}): they overlap "
                f"registered memory, or the limit on locked memory (ulimit -l) is too low"
            )

    def write(
        self,
        session: str,
        local_address: int,
        remote_address: int,
        nbytes: int,
        timeout_s: float,
        *,
        keep: object = None,
    ) -> None:
        """Copy `nbytes` from here to the peer; returns when the peer has them. Blocks.

        After an error, some of the bytes may have arrived, and after a timeout more may
        arrive: Mooncake cannot cancel, and applies the bytes in the peer's socket buffers
        when a frozen peer wakes. It gives up by itself after 30 s without progress
        (`MC_TCP_PROGRESS_TIMEOUT_SEC`), until when it also reads the source.

        Args:
            keep: owner of the source memory, which is held until Mooncake is done with it.

        Raises:
            UnavailableError: the peer is dead or frozen, or refused because the bytes do
                not fall within memory that it has registered. Where the transfer had begun,
                `ended` of the error says whether Mooncake is done with it.
        """
        deadline = time.monotonic() + timeout_s
        self.contact(session, deadline)
        if time.monotonic() >= deadline:
            # This process may have been stopped for so long that the memory is another's.
            raise UnavailableError(f"no time was left to begin a write to {session}")
        batch = self._engine.transfer_submit_write(session, local_address, remote_address, nbytes)
        if batch in _NOT_SUBMITTED:
            self._forget(session)
            raise UnavailableError(f"Mooncake cannot reach {session}")
        status = _await(self._engine, batch, deadline)
        if status == _COMPLETED:
            return
        self._forget(session)
        if status == _FAILED:
            raise self._given_up(batch, f"{session} is gone, or refused a write of {nbytes} bytes")
        with self._lock:
            self._reap()
            self._unfinished[batch] = keep
        raise self._given_up(batch, f"a write of {nbytes} bytes to {session} did not end in time")

    def _given_up(self, batch: int, what: str) -> UnavailableError:
        """The error of a transfer. No frame that it goes through may hold it: they hold `keep`."""
        error = UnavailableError(what)
        error.ended = partial(self._ended, batch)
        return error

    def contact(self, session: str, deadline: float) -> None:
        """Wait until a peer that was not written to before answers a probe.

        Raises:
            UnavailableError: it does not.
        """
        with self._lock:
            contact = self._contacts.get(session)
            if contact is None:
                contact = Future()
                threading.Thread(
                    target=_probe,
                    args=(self._engine, session, contact),
                    name="mooncake-probe",
                    daemon=True,
                ).start()
                self._contacts[session] = contact
        try:
            code = contact.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            # The probe goes on for 60 s at most, and later writes wait for the same one.
            raise UnavailableError(f"{session} does not answer") from None
        if code != 0:
            self._forget(session)
            raise UnavailableError(f"Mooncake cannot reach {session} (code {code})")

    def _forget(self, session: str) -> None:
        """Probe again before the next write, once an earlier probe has ended."""
        with self._lock:
            contact = self._contacts.get(session)
            if contact is not None and contact.done():
                del self._contacts[session]

    def _ended(self, batch: int) -> bool:
        with self._lock:
            self._reap()
            return batch not in self._unfinished

    def _reap(self) -> None:
        """Drop batches that have ended; the lock must be held, as a batch may end only once."""
        for batch in list(self._unfinished):
            if self._engine.transfer_check_status(batch) in {_COMPLETED, _FAILED}:
                del self._unfinished[batch]


def _probe(engine: Any, session: str, contact: Future[int]) -> None:
    code = _NO_PROBE
    try:
        code = engine.send_probe(session)
    except Exception:
        logger.exception("Mooncake cannot probe %s", session)
    finally:
        # Without it no write would start again: all wait for this one.
        contact.set_result(code)


def _await(engine: Any, batch: int, deadline: float) -> int:
    """The status in which a transfer ended, or any other at the deadline."""
    started = time.monotonic()
    while True:
        status: int = engine.transfer_check_status(batch)
        now = time.monotonic()
        # Anything but 0 is an end, or RDMA's own timeout, after which slices may go on.
        if status != _UNDER_WAY or now >= deadline:
            return status
        pause_s = min(max((now - started) / 16, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        time.sleep(min(pause_s, deadline - now))
