"""The five bytes in front of every message, and the meaning of a version.

`b"EPD"`, major, minor. A peer of another major version is refused. Fields that a
newer minor version added are ignored (msgspec skips keys it does not know), so a
newer server can talk to an older one.
"""

from __future__ import annotations

from sglang_epd.errors import ProtocolError

MAGIC = b"EPD"
MAJOR = 1
MINOR = 2
_HEADER = MAGIC + bytes((MAJOR, MINOR))


def seal(body: bytes) -> bytes:
    """Put the envelope in front of an encoded message body."""
    return _HEADER + body


def open_envelope(frame: bytes | memoryview, max_bytes: int) -> memoryview:
    """Check the envelope and return the body.

    Raises:
        ProtocolError: too long, not ours, or of another major version.
    """
    view = memoryview(frame)
    if view.nbytes > max_bytes:
        raise ProtocolError(f"message of {view.nbytes} bytes, limit {max_bytes}")
    if view.nbytes < len(_HEADER) or bytes(view[: len(MAGIC)]) != MAGIC:
        raise ProtocolError("not a sglang-epd message")
    major = view[len(MAGIC)]
    if major != MAJOR:
        raise ProtocolError(
            f"peer speaks protocol version {major}, this server {MAJOR}: "
            "run releases of sglang-epd with one protocol on both"
        )
    return view[len(_HEADER) :]
