"""The arena: the memory that payloads arrive in, one per host, shared by all its readers.

An arena is an anonymous file in memory. The receiver makes it; encoders of the same
machine write into it, schedulers map it and read embeddings where they arrived. It
needs no room in /dev/shm, takes no memory until it is written to, and is gone with its
last process.

It begins with a page that holds its seal, whether its pages must stay where they are, and how
often pages were given back; then one counter for each slot and reader: a reader adds one when it
drops an embedding. That is all a reader ever says, so that it can be said from a finalizer, on
any thread, without a lock on a socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sglang_epd.device import Device
from sglang_epd.errors import ProtocolError, from_code
from sglang_epd.processes.packets import SEALS, new_file
from sglang_epd.transfer.extents import ALIGNMENT, aligned
from sglang_epd.wire.messages import Landed, Layout, Settled, TensorSpec, Welcome
from sglang_epd.wire.tensors import spec_bytes, view_tensor

if TYPE_CHECKING:
    import torch

# Embeddings that readers may hold at a time.
SLOTS = 16384
_NAME = "sglang-epd-arena"
_SEAL_BYTES = 32
# The byte that says whether pages must stay.
_KEEPS_PAGES = _SEAL_BYTES
# The number that says how often pages were given back.
_RETURNS = slice(_SEAL_BYTES + 4, _SEAL_BYTES + 8)
_MADV_POPULATE_WRITE = 23
# Meanwhile no other thread of the process maps memory.
_POPULATED_BYTES = 16 << 20
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


# A second mapping of the same pages would count as so much more memory.
_made_here: weakref.WeakValueDictionary[bytes, Arena] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Address:
    """How another process of this machine finds an arena."""

    path: str
    size: int
    seal: bytes
    readers: int = 0


@dataclass(frozen=True)
class ReceivedItem:
    """An item's identity, layout and embedding [tokens, width], on the host. Of an item that a
    part of a prompt ends within, the embedding has the first tokens alone."""

    key: bytes
    layout: Layout
    embedding: torch.Tensor

    def copied(self) -> ReceivedItem:
        """With its rows in this process's own memory, where they hold up no other request."""
        return replace(self, embedding=self.embedding.clone())


class Arena:
    """Maps an arena. Use `create` or `open`.

    Attributes:
        data: the payload bytes, uint8 [size of data].
        address: the facts that other processes need to map it.
    """

    def __init__(self, fd: int, address: Address) -> None:
        self.address = address
        self._fd = fd
        self._map = mmap.mmap(fd, address.size)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        counters = SLOTS * address.readers * 4
        begin = ALIGNMENT + aligned(counters)
        self.data_offset = begin
        self.data = whole[begin:]
        self._drops = (
            whole[ALIGNMENT : ALIGNMENT + counters].view(np.uint32).reshape(SLOTS, address.readers)
        )
        self._lock = threading.RLock()
        self._returns = whole[_RETURNS].view(np.uint32)
        # Pages in this process's page table, as of so many returns.
        self._populated = np.zeros(len(self.data) // ALIGNMENT, bool)
        self._populated_since = 0

    @classmethod
    def create(cls, data_bytes: int, readers: int) -> Arena:
        """Make an arena.

        Args:
            data_bytes: room for payloads.
            readers: processes that read it, numbered from 0.

        Raises:
            OSError: the system refuses.
        """
        size = ALIGNMENT + aligned(SLOTS * readers * 4) + aligned(data_bytes)
        seal = secrets.token_bytes(_SEAL_BYTES)
        fd = new_file(size, _NAME)
        arena = cls(fd, Address(f"/proc/{os.getpid()}/fd/{fd}", size, seal, readers))
        arena._map[:_SEAL_BYTES] = seal
        _made_here[seal] = arena
        return arena

    @classmethod
    def of(cls, welcome: Welcome) -> Arena:
        """Map the arena that a receiver's `Welcome` names. Raises the errors of `open`."""
        return cls.open(Address(welcome.path, welcome.size, welcome.seal, welcome.readers))

    @classmethod
    def open(cls, address: Address) -> Arena:
        """Map an arena by its address; one that this process has made is returned itself.

        Raises:
            ProtocolError: the file is not that arena.
            OSError: it cannot be opened.
        """
        if (own := _made_here.get(address.seal)) is not None:
            return own
        if not _PATH.fullmatch(address.path) or len(address.seal) != _SEAL_BYTES:
            raise ProtocolError("not the address of an arena")
        # A peer named the path: it must lead to nothing but an arena, and not be turned
        # elsewhere before it is opened.
        _check_leads_to_arena(address.path)
        fd = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _check_leads_to_arena(f"/proc/self/fd/{fd}")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ProtocolError(f"{address.path} may change its size")
            if os.fstat(fd).st_size != address.size or os.pread(fd, _SEAL_BYTES, 0) != address.seal:
                raise ProtocolError(f"{address.path} is another arena")
            arena = cls(fd, address)
        finally:
            # The mapping needs no open file.
            os.close(fd)
        arena._fd = -1
        return arena

    @property
    def machine_address(self) -> int:
        """Address of the first payload byte in this process."""
        return int(self.data.ctypes.data)

    def span(self, offset: int, nbytes: int) -> np.ndarray:
        """The bytes of one payload.

        Args:
            offset, nbytes: in bytes, from the beginning of the arena.

        Raises:
            ProtocolError: outside the arena.
        """
        if not 0 <= offset <= offset + nbytes <= len(self.data):
            raise ProtocolError("outside the arena")
        return self.data[offset : offset + nbytes]

    def read(self, item: Landed, reader: int) -> torch.Tensor:
        """The embedding of an item, where it lies; no copy.

        The memory stays reserved until the tensor, and every view of it, is gone.

        Args:
            item: where the embedding is.
            reader: this process's number.

        Returns:
            [tokens that are there, width], in the arena.
        """
        # torch keeps this very object for as long as any view of the tensor lives.
        owner = self.span(item.offset, item.nbytes)
        weakref.finalize(owner, self.drop, item.slot, reader).atexit = False
        spec = item.layout.embedding
        tokens = spec.shape[0] * item.nbytes // max(spec_bytes(spec), 1)
        return view_tensor(owner, TensorSpec(spec.dtype, (tokens, *spec.shape[1:])))

    def receive(self, settled: Settled, reader: int) -> list[ReceivedItem]:
        """The items of a claim, but for those that it covered itself.

        Args:
            settled: the outcome of the claim.
            reader: this process's number.

        Raises:
            EpdError: the claim failed; this is its error.
        """
        items = [
            ReceivedItem(item.key, item.layout, self.read(item, reader))
            for item in settled.items
            if item is not None
        ]
        if settled.code:
            # The error's trace will hold this frame.
            items.clear()
            raise from_code(settled.code, settled.message)
        return items

    def drop(self, slot: int, reader: int) -> None:
        """Reader `reader` holds one embedding of `slot` less."""
        with self._lock:
            self._drops[slot, reader] += 1

    def drops(self, slots: np.ndarray) -> np.ndarray:
        """How often each reader has dropped each of `slots`: [slots, readers]."""
        return self._drops[slots]

    def reset(self, slot: int) -> None:
        """Before a slot is used again."""
        self._drops[slot] = 0

    def keep_pages(self) -> None:
        """From now on `give_back` does nothing, in all processes: something that does not ask
        the system where pages are would go on with the old ones."""
        self._map[_KEEPS_PAGES] = True

    def register(self, device: Device) -> None:
        """Let a device read and write payloads beside other work, from this process.

        All of the arena's memory is taken at once, and never given back.

        Raises:
            RuntimeError: the device's driver refuses.
        """
        self.keep_pages()
        device.register(self.machine_address, len(self.data))

    def populated(self, offset: int, nbytes: int) -> bool:
        """Whether `populate` would ask for pages that are there, which takes a third of the time
        of a copy."""
        return bool(self._known_pages(offset, nbytes).all())

    def _known_pages(self, offset: int, nbytes: int) -> np.ndarray:
        """For each page of a payload, whether it is in the page table, as far as is known."""
        if self._populated_since != (returns := int(self._returns[0])):
            self._populated[:] = False
            self._populated_since = returns
        return self._populated[offset // ALIGNMENT : -(-(offset + nbytes) // ALIGNMENT)]

    def populate(self, offset: int, nbytes: int) -> None:
        """Have the pages of payloads in this process's page table; their content stays.

        The first write to each takes six times as long otherwise. Before Linux 5.14 nothing
        happens.

        Args:
            offset, nbytes: of `data`, the offset aligned.

        Raises:
            ProtocolError: outside the arena.
        """
        span = self.span(offset, nbytes)
        pages = self._known_pages(offset, nbytes)
        madvise = ctypes.CDLL(None).madvise
        for begin in range(0, len(span), _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, len(span) - begin)
            address = ctypes.c_void_p(self.machine_address + offset + begin)
            madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
        pages[:] = True

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Return the memory of unused payloads to the system.

        Args:
            ranges: [begin, end) of `data`, aligned.
        """
        if self._map[_KEEPS_PAGES]:
            return
        for begin, end in ranges:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE, self.data_offset + begin, end - begin)
        self._returns += 1

    def close(self) -> None:
        """Close the file that `create` made; no other process can map it any more.

        The mapping itself goes when nothing refers to it any more.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check_leads_to_arena(path: str) -> None:
    if os.readlink(path) != f"/memfd:{_NAME} (deleted)":
        raise ProtocolError(f"{path} is not an arena")
