"""The record that `up` leaves for `status` and `top`: one folder for each run.

`$XDG_RUNTIME_DIR/sglang-epd/<pid>/`, or `/tmp/sglang-epd-runs-<uid>/<pid>/`, holds
`state.json`, the servers' logs, and a lock that the run holds for as long as it lives, be
it killed or not. A log of 64 to 128 MiB begins anew, and what it had is beside it (`.earlier`);
`.previous` is that of a server before it was started again. Only this user may enter. `tmp` there
leads to the servers' own folder for temporary files, because SGLang's sockets and empty files
outlive it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_epd.errors import ConfigError

_STATE = "state.json"
_LOCK = "lock"
_TEMPORARY = "tmp"
# Folders of runs that ended without taking them away hold the logs that say why.
_KEPT = 5


def root(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of all of this user's runs.

    Raises:
        ConfigError: another user can write there.
    """
    given = env.get("XDG_RUNTIME_DIR", "")
    if given and os.access(given, os.W_OK):
        folder = Path(given) / "sglang-epd"
    else:
        folder = Path(tempfile.gettempdir()) / f"sglang-epd-runs-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{folder} is not a folder of this user's own; remove it")
    return folder


class Run:
    """One `up`, from its first server to its last.

    Attributes:
        folder: its own, in that of all runs.
        temporary: for its servers' temporary files; in the system's folder for these, since
            paths of sockets have to be short.
    """

    def __init__(self, parent: Path) -> None:
        _forget(parent)
        self.folder = parent / str(os.getpid())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.temporary = Path(tempfile.mkdtemp(prefix="epd-"))
        (self.folder / _TEMPORARY).symlink_to(self.temporary)

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the record of this run, as a whole."""
        temporary = self.folder / f"{_STATE}.new"
        with temporary.open("w") as file:
            os.chmod(file.fileno(), 0o600)
            json.dump(state, file, indent=1)
        temporary.replace(self.folder / _STATE)

    def close(self, *, keep: bool) -> None:
        """End it; its logs are kept where they may be wanted."""
        _remove_temporary(self.folder)
        if keep:
            (self.folder / _STATE).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def find(parent: Path) -> list[dict[str, Any]]:
    """The last records of the runs that live, the latest run first."""
    found = []
    for folder in parent.iterdir():
        if folder.name.isdecimal() and _held(folder):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads((folder / _STATE).read_text()))
    return sorted(found, key=lambda state: state["started_at"], reverse=True)


def _held(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def _forget(parent: Path) -> None:
    """Remove the records of ended runs, but for the logs of the last of them."""
    left = [folder for folder in parent.iterdir() if folder.is_dir() and not _held(folder)]
    left.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in left:
        _remove_temporary(folder)
    for folder in left[_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_temporary(folder: Path) -> None:
    link = folder / _TEMPORARY
    if link.is_symlink():
        shutil.rmtree(link.readlink(), ignore_errors=True)
        link.unlink()
