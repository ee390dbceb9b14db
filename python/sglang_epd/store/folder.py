"""A folder of safetensors files, on a disk of this machine or a shared mount.

    <folder>/<namespace>/<version>/<first two digits of the key>/<key>.safetensors

A file appears under its name by a rename, so no reader sees half of one. Several encoders
may share the folder; each that writes also sweeps. A sweep removes the least recently used
files over `max_bytes`: a hit renews a file's modification time, where that is allowed. Room is left
on the filesystem, which others use too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sglang_epd.store.backend import OversizedError, StoreError, Threads

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_READERS = 4
_SUFFIX = ".safetensors"
_UNFINISHED = ".part"
# A sweep leaves this share of `max_bytes`. It is due after so many seconds, or after writes
# of so large a share. Unfinished files of that age are abandoned.
_ROOM = 0.9
_SWEEP_EVERY_S = 60.0
_SWEEP_SHARE = 0.05
_ABANDONED_S = 3600.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# What is left of a filesystem: a tenth, or so many bytes where that is less.
_SPARED = 0.1
_SPARED_BYTES = 4 << 30
# How often a file that is used again and again is marked as used.
_TOUCH_EVERY_S = 60.0


class _File(NamedTuple):
    path: str
    nbytes: int
    used_at: float


class FolderStore:
    """A `StoreBackend`.

    Args:
        root: of this namespace; made if it is not there.
        max_bytes: of all files below `root`; less where the filesystem has no room for them.
        ttl_s: files that were not used for so long are swept.
    """

    def __init__(self, root: Path, max_bytes: int, ttl_s: float) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        # Of their own: a mount may read, and hang with what is written.
        self._reading = Threads("store folder reads", _READERS)
        self._writing = Threads("store folder writes", 1)
        self._removing = Threads("store folder sweeps", 1)
        self._written = 0
        self._swept_at = float("-inf")
        self._sweeping: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        await _run(self._writing, lambda: self._root.mkdir(parents=True, exist_ok=True))

    async def get(self, name: str, max_bytes: int) -> np.ndarray | None:
        return await _run(self._reading, lambda: self._read(self._path(name), max_bytes))

    async def put(self, name: str, pieces: Sequence[memoryview]) -> None:
        # Counted first: a write that takes too long for its caller goes on, and its file appears.
        self._written += sum(piece.nbytes for piece in pieces)
        try:
            await _run(self._writing, lambda: self._write(self._path(name), pieces))
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) in _NO_ROOM:
                self._begin_sweep(full=True)
            raise
        finally:
            due = time.monotonic() - self._swept_at > _SWEEP_EVERY_S
            if due or self._written > self._max_bytes * _SWEEP_SHARE:
                self._begin_sweep()

    async def remove(self, name: str) -> None:
        await _run(self._writing, lambda: self._path(name).unlink(missing_ok=True))

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for threads in (self._reading, self._writing, self._removing):
            threads.close()

    def _begin_sweep(self, *, full: bool = False) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._swept_at, self._written = time.monotonic(), 0
            self._sweeping = asyncio.create_task(self._sweep(full))

    async def _sweep(self, full: bool) -> None:
        try:
            await _run(self._removing, lambda: self.sweep(full=full))
        except StoreError as error:
            logger.warning("The store's folder cannot be swept: %s", error)

    def sweep(self, *, full: bool = False) -> None:
        """Remove entries that are too old, abandoned, or over the bound; blocks.

        Args:
            full: the disk is, so that a tenth of the entries goes in any case.
        """
        now = time.time()
        files = []
        for file in self._files():
            limit_s = _ABANDONED_S if file.path.endswith(_UNFINISHED) else self._ttl_s
            if now - file.used_at > limit_s:
                _unlink(file.path)
            else:
                files.append(file)
        total = sum(file.nbytes for file in files)
        bound = max(0, min(self._max_bytes, total + _spare_bytes(self._root)))
        if total <= bound and not full:
            return
        room = min(total, bound) * _ROOM
        for file in sorted(files, key=lambda file: file.used_at):
            if total <= room:
                break
            if _unlink(file.path):
                total -= file.nbytes

    def _files(self) -> Iterator[_File]:
        """The store's files, in all versions; other encoders add and remove some meanwhile."""
        for version in _folder(self._root):
            for shard in _folder(version):
                for entry in _folder(shard):
                    if not entry.name.endswith((_SUFFIX, _UNFINISHED)):
                        continue
                    with contextlib.suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield _File(entry.path, found.st_size, found.st_mtime)

    def _path(self, name: str) -> Path:
        version, _, key = name.partition("/")
        return self._root / version / key[:2] / f"{key}{_SUFFIX}"

    def _read(self, path: Path, max_bytes: int) -> np.ndarray | None:
        # Not through a link, and without waiting for the other end of a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path.name} is not a file")
            if found.st_size > max_bytes:
                raise OversizedError(f"{path.name} has {found.st_size} bytes")
            raw = np.empty(found.st_size, dtype=np.uint8)
            filled = 0
            while filled < raw.nbytes:
                count = file.readinto(raw[filled:].data)
                if not count:
                    # The file was cut short meanwhile; the digest will not fit.
                    return raw[:filled]
                filled += count
            if time.time() - found.st_mtime > _TOUCH_EVERY_S:
                # On a read-only mount another host sweeps.
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        return raw

    def _write(self, path: Path, pieces: Sequence[memoryview]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _spare_bytes(self._root) < sum(piece.nbytes for piece in pieces):
            raise OSError(errno.ENOSPC, "the filesystem has no room to spare")
        unfinished = path.parent / f".{path.stem}.{os.urandom(8).hex()}{_UNFINISHED}"
        try:
            with unfinished.open("xb", buffering=0) as file:
                for piece in pieces:
                    rest = piece
                    while rest.nbytes:
                        rest = rest[file.write(rest) :]
            unfinished.replace(path)
        except BaseException:
            _unlink(unfinished)
            raise


async def _run(threads: Threads, call: Callable[[], _Result]) -> _Result:
    try:
        return await threads.run(call)
    except OSError as error:
        raise StoreError(f"{error.strerror or error}") from error


def _spare_bytes(folder: Path) -> int:
    """What a filesystem has beyond what is left to others; negative where it has less."""
    found = os.statvfs(folder)
    spared = min(_SPARED * found.f_blocks * found.f_frsize, _SPARED_BYTES)
    return int(found.f_bavail * found.f_frsize - spared)


def _folder(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder; none of a link, which may lead out of the store."""
    if isinstance(folder, os.DirEntry) and not folder.is_dir(follow_symlinks=False):
        return []
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        _complain(os.fspath(folder), error.strerror)
        return []


@functools.lru_cache(maxsize=1024)
def _complain(folder: str, why: str) -> None:
    """Once, of a folder that is not swept."""
    logger.warning("A folder of the store is passed over: %s: %s", folder, why)


def _unlink(path: str | Path) -> bool:
    """Remove a file, if it may be removed; whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
