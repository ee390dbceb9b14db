"""The folder in which the processes of one server find each other.

The launcher draws a run id as it resolves the server's flags, and its children inherit it: a
process may hold several `Engine`s, one after another or at once. The folder itself is made
only by the process that receives, and the process that drew the id removes it at exit: one of
several tokenizer workers that receive draws its own. The next server removes the folder of a
killed one: the process that receives holds a lock on its folder for as long as it lives.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "SGLANG_EPD_RUN_ID"
# The id names a folder that others can list; this they cannot know.
_SECRET = "SGLANG_EPD_RUN_SECRET"
# Linux's limit on the path of a Unix socket.
_LONGEST = 107


def draw_run_id() -> None:
    """Give the server that is started next a run id and secret."""
    os.environ[_SECRET] = secrets.token_hex(32)
    draw_folder()


def draw_folder() -> None:
    """Give this process a folder of its own, of those of its server: a tokenizer worker that
    receives by itself."""
    os.environ[_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(6)}"
    # Not by another process, which may end, and be started again, by itself.
    atexit.register(shutil.rmtree, control_path().parent, ignore_errors=True)


def secret() -> bytes:
    """32 bytes that only this server's processes share."""
    return bytes.fromhex(os.environ[_SECRET])


def control_path() -> Path:
    """Unix socket of the control channel between tokenizer and scheduler; in `/tmp` where its
    path in `TMPDIR` is too long for a socket."""
    inside = Path(f"sglang-epd-{os.getuid()}-{os.environ[_VARIABLE]}") / "control"
    path = tempfile.gettempdir() / inside
    return path if len(os.fsencode(path)) <= _LONGEST else "/tmp" / inside


def claim() -> int:
    """Make this server's folder and lock it; remove the folders without a lock.

    Returns:
        The lock's file descriptor, which stays open until the process ends.
    """
    folder = control_path().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    for other in folder.parent.glob(f"sglang-epd-{os.getuid()}-*"):
        # Another user may have put a pipe there, which would block us.
        with contextlib.suppress(OSError):
            if other.lstat().st_uid == os.getuid():
                _remove_unless_held(other)
    return held


def _remove_unless_held(folder: Path) -> None:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / "lock", flags)
    try:
        # Fails with BlockingIOError, an OSError, where the owner lives.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
