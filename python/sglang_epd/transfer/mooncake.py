"""One-sided writes into another process's memory, by Mooncake's transfer engine.

A receiver registers a buffer and tells its `session` and an address to whoever may write
there; an encoder writes. Over TCP a write that returns has been applied at the other
end: the receiver acknowledges the last byte. Over RDMA the NIC has.

Mooncake checks that a write falls within registered memory of the receiver, and nothing
else: no secret is asked, and its ports listen on every interface, so that whoever
reaches them may write there, and read. Who may hold an address and when, and what to do
with memory that a write was granted and did not finish, is for the layers above.

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

import importlib
import ipaddress
import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

from sglang_epd.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

# What `transfer_submit_write` answers when it did not: 0, or -1 as an unsigned number.
_NOT_SUBMITTED = (0, -1, 2**64 - 1)
_UNDER_WAY = 0
_COMPLETED = 1
_FAILED = -1
# What came of a probe that raised.
_NO_PROBE = -1
# Pauses between two looks at a transfer: a sixteenth of the time it has taken, within
# these. A look costs some microseconds; a pause too long is added to the transfer.
_SHORTEST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 2e-3
_LIBRARIES = "libibverbs1, librdmacm1 and libnuma1 on Debian and Ubuntu"

# Sources of writes that were under way when their engine was closed, kept for good.
_abandoned: list[object] = []


class MooncakeEngine:
    """A transfer engine of this process: its own, or one shared with SGLang.

    All methods may be called from any thread.

    Args:
        hostname: address at which peers reach this host. It is published, not bound to.
        protocol: "tcp", "rdma" or another that Mooncake knows. It takes what it finds
            whatever it is told, so "tcp" sets `MC_FORCE_TCP` unless the user has, and
            "rdma" on a host without an RDMA device is TCP.
        device_name: RDMA devices to use, comma-separated; empty for all.
        engine: an initialised `mooncake.engine.TransferEngine` to share, for which
            `protocol` and `device_name` mean nothing any more; `close` leaves it running.

    Raises:
        ConfigError: Mooncake is not installed, lacks a system library, or does not start.
    """

    def __init__(
        self,
        hostname: str,
        protocol: str = "tcp",
        device_name: str = "",
        engine: Any = None,
    ) -> None:
        if engine is None:
            engine = _start(hostname, protocol, device_name)
        self._engine: Any = engine
        self._session = _host_port(hostname, self._engine.get_rpc_port())
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        # First contact with each session: what its probe came back with, 0 if it answers.
        self._contacts: dict[str, Future[int]] = {}
        # Transfers that outlived their write's deadline, and what keeps their source alive.
        self._unfinished: dict[int, object] = {}

    @property
    def session(self) -> str:
        """What a peer passes to `write`: "host:port", with brackets around IPv6."""
        return self._session

    @property
    def unfinished(self) -> int:
        """How many writes timed out and are still under way, as far as is known."""
        with self._lock:
            self._reap()
            return len(self._unfinished)

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to this memory, and read it. RDMA needs it for sources too.

        Raises:
            ConfigError: refused, because it overlaps what is registered or, with RDMA,
                because memory cannot be locked.
        """
        code = self._running().register_memory(address, nbytes)
        if code != 0:
            raise ConfigError(
                f"Mooncake does not register {nbytes} bytes (code {code}): they overlap "
                f"registered memory, or the limit on locked memory (ulimit -l) is too low"
            )
        with self._lock:
            self._registered.add(address)

    def unregister(self, address: int) -> None:
        """Refuse writes that begin later; one that is under way goes on.

        The memory must therefore stay until every write that was granted has ended.

        Raises:
            ValueError: nothing was registered at this address.
        """
        engine = self._running()
        with self._lock:
            if address not in self._registered:
                raise ValueError("no memory is registered at this address")
            self._registered.remove(address)
        code = engine.unregister_memory(address)
        if code != 0:
            logger.warning("Mooncake did not unregister memory: code %d", code)

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
        arrive: Mooncake cannot cancel, and what is in the peer's socket buffers is applied
        when a frozen peer wakes. It gives up by itself after 30 s without progress
        (`MC_TCP_PROGRESS_TIMEOUT_SEC`), until when it also reads the source.

        Args:
            keep: owner of the source memory, which is held until Mooncake is done with it.

        Raises:
            UnavailableError: the peer is dead or frozen, or refused because the bytes do
                not fall within memory that it has registered.
        """
        deadline = time.monotonic() + timeout_s
        engine = self._running()
        self._contact(engine, session, deadline)
        batch = engine.transfer_submit_write(session, local_address, remote_address, nbytes)
        if batch in _NOT_SUBMITTED:
            self._forget(session)
            raise UnavailableError(f"Mooncake cannot reach {session}")
        status = _await(engine, batch, deadline)
        if status == _COMPLETED:
            return
        self._forget(session)
        if status == _FAILED:
            raise UnavailableError(f"{session} is gone, or refused a write of {nbytes} bytes")
        self._leave(batch, keep)
        raise UnavailableError(f"a write of {nbytes} bytes to {session} did not end in time")

    def close(self) -> None:
        """Unregister everything and let go of the engine. May be called twice.

        An engine that nobody shares ends with that, which takes up to a second in which
        no other Python thread runs: Mooncake joins its threads without releasing the GIL.
        A write or probe in another thread puts this off until it has ended.
        """
        with self._lock:
            if self._engine is None:
                return
            self._reap()
            for address in self._registered:
                self._engine.unregister_memory(address)
            self._registered.clear()
            _abandoned.extend(self._unfinished.values())
            self._unfinished.clear()
            self._engine = None

    def _running(self) -> Any:
        engine = self._engine
        if engine is None:
            raise UnavailableError("this Mooncake engine is closed")
        return engine

    def _contact(self, engine: Any, session: str, deadline: float) -> None:
        """Wait until a peer that was not written to before answers a probe."""
        with self._lock:
            contact = self._contacts.get(session)
            if contact is None:
                contact = self._contacts[session] = Future()
                threading.Thread(
                    target=_probe,
                    args=(engine, session, contact),
                    name="mooncake-probe",
                    daemon=True,
                ).start()
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

    def _leave(self, batch: int, keep: object) -> None:
        with self._lock:
            if self._engine is not None:
                self._reap()
                self._unfinished[batch] = keep
            else:
                _abandoned.append(keep)

    def _reap(self) -> None:
        """Drop what has ended since; the lock must be held, as a batch may end only once."""
        for batch in list(self._unfinished):
            if self._engine.transfer_check_status(batch) in {_COMPLETED, _FAILED}:
                del self._unfinished[batch]


def _start(hostname: str, protocol: str, device_name: str) -> Any:
    # Mooncake reads these when it is imported or its first engine starts. Its log at INFO,
    # the default, has a line for each peer; GLOG_minloglevel has no effect on it.
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    if _is_ipv6(hostname):
        os.environ.setdefault("MC_USE_IPV6", "1")
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise ConfigError(
            'the mooncake backend needs Mooncake: pip install ".[mooncake]" in a clone of '
            "sglang-epd (mooncake-cpu without CUDA)"
        ) from None
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded: {error}. It needs {_LIBRARIES}") from error
    engine = module.TransferEngine()
    code = engine.initialize(hostname, "P2PHANDSHAKE", protocol, device_name)
    if code != 0:
        raise ConfigError(f"Mooncake does not start with {protocol} on {hostname} (code {code})")
    return engine


def _probe(engine: Any, session: str, contact: Future[int]) -> None:
    code = _NO_PROBE
    try:
        code = engine.send_probe(session)
    except Exception:
        logger.exception("Mooncake cannot probe %s", session)
    finally:
        # Or nobody would ever write there again: all wait for this one.
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


def _host_port(hostname: str, port: int) -> str:
    return f"[{hostname}]:{port}" if _is_ipv6(hostname) else f"{hostname}:{port}"


def _is_ipv6(hostname: str) -> bool:
    try:
        return ipaddress.ip_address(hostname).version == 6
    except ValueError:
        return False
