"""Reading a local file that a request names, from beneath one folder only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from sglang_epd.errors import MediaError, MediaForbiddenError, MediaTooLargeError
from sglang_epd.media.limits import NO_LIMIT, MediaLimits


def open_local(url: str, limits: MediaLimits) -> BinaryIO:
    """Open the file of a file URL. Blocking: call it off the event loop.

    Symbolic links are resolved before the path is judged, so one that leads out of
    `limits.allowed_local_root` does not help; and a file outside is refused without
    a word on whether it exists.

    Raises:
        MediaForbiddenError: local files are not allowed, or this one lies outside.
        MediaTooLargeError: it is larger than `limits.max_bytes`.
        MediaError: there is no such regular file, or it cannot be read.
    """
    root = limits.allowed_local_root
    if root is None:
        raise MediaForbiddenError("local files may not be read by this server")
    try:
        path = Path(os.fsdecode(unquote_to_bytes(url.removeprefix("file://")))).resolve()
        root = root.resolve()
    except (OSError, RuntimeError, ValueError):  # link loops and over-long names among them
        raise MediaForbiddenError("the path cannot be resolved") from None
    outside = MediaForbiddenError("the path lies outside the folder that may be read")
    if not path.is_relative_to(root):
        raise outside
    try:
        # Devices act on being opened, and a FIFO without a writer would block.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise MediaError("the path is not a regular file")
        # O_NOFOLLOW and O_NONBLOCK hold should the file be replaced in between, and where it
        # is found then is judged should a folder be.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        file = os.fdopen(descriptor, "rb")
        if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(root):
            file.close()
            raise outside
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size <= limits.max_bytes:
            return file
        file.close()
    except FileNotFoundError:
        raise MediaError("no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(error) from None
    if not stat.S_ISREG(status.st_mode):
        raise MediaError("the path is not a regular file")
    raise MediaTooLargeError(f"the file has {status.st_size} bytes, limit {limits.max_bytes}")


def read_local(file: BinaryIO, limits: MediaLimits) -> bytes:
    """Read an opened file, and close it. Blocking: call it off the event loop, where it may not be
    closed meanwhile: that would wait for this to end.

    Raises:
        MediaTooLargeError: it has grown larger than `limits.max_bytes`.
        MediaError: it cannot be read.
    """
    bounded = limits.max_bytes < NO_LIMIT
    try:
        with file:
            data = file.read(limits.max_bytes + 1 if bounded else -1)
    except OSError as error:
        raise _unreadable(error) from None
    if len(data) > limits.max_bytes:
        raise MediaTooLargeError(f"the file has more than {limits.max_bytes} bytes")
    return data


def _unreadable(error: Exception) -> MediaError:
    reason = getattr(error, "strerror", None) or type(error).__name__
    return MediaError(f"the file cannot be read: {reason}")
