"""Servers' logs, followed line by line, and the phases of start-up that they show."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

# A text of a server's log, and the phase of its start-up that begins there.
PHASES = (
    ("server_args=", "configured"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "weights loaded"),
    ("KV Cache is allocated", "KV cache allocated"),
    ("Capture cuda graph begin", "capturing graphs"),
    ("Uvicorn running", "listening"),
)
FIRST_PHASE = "importing"
# At most so much at a time, so that a flood delays no other server's lines.
_CHUNK_BYTES = 1 << 20
# Longer lines are shown in pieces.
_LINE_BYTES = 64 << 10
# A log that is longer begins anew: the folder may be in memory.
_MAX_LOG_BYTES = 64 << 20


def phase_of(line: str) -> str:
    """The phase that begins with this line; empty for none."""
    return next((phase for text, phase in PHASES if text in line), "")


def earlier(path: Path) -> Path:
    """Where the text is that a log had before it began anew."""
    return path.with_name(f"{path.name}.earlier")


class LogFollower:
    """Reads the lines that are added to a file, which may not be there yet, or be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int = -1
        self._rest = b""

    def lines(self) -> list[str]:
        """The lines that were finished since the last call."""
        if self._file < 0:
            with contextlib.suppress(FileNotFoundError):
                self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        if self._file < 0:
            return []
        *whole, self._rest = (self._rest + os.read(self._file, _CHUNK_BYTES)).split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]

    def shorten(self) -> None:
        """Have a file begin anew that has become long; what it had is beside it (`earlier`).

        Its writer appends to it. What is written in this moment may be lost, and what has not
        been read of a file of twice the length is not shown.
        """
        size = 0 if self._file < 0 else os.fstat(self._file).st_size
        unread = size and os.lseek(self._file, 0, os.SEEK_CUR) < size
        if size < (2 * _MAX_LOG_BYTES if unread else _MAX_LOG_BYTES):
            return
        # It may have been removed, and a full disk needs it the more.
        with contextlib.suppress(OSError):
            shutil.copyfile(f"/proc/self/fd/{self._file}", earlier(self._path))
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        if unread:
            self._rest = b""

    def finish(self) -> list[str]:
        """All that is left, whole lines or not; the next call reads a new file."""
        found = []
        while more := self.lines():
            found += more
        if self._rest:
            found.append(self._rest.decode(errors="replace"))
        if self._file >= 0:
            os.close(self._file)
        self._file, self._rest = -1, b""
        return found
