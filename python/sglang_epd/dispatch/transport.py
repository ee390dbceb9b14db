"""The contract of a transport to encoders; `client` has HTTP, `rpc` has gRPC.

A transport moves a request's body and gives back whatever was answered. It makes nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_epd.errors import UnavailableError

MAX_REPLY_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 2.0
_WRITTEN_BYTES = 256 << 10


@dataclass(frozen=True)
class Answer:
    """An encoder's answer to an encode request.

    Attributes:
        status: of HTTP.
        again: the `Retry-After` header; empty without one.
    """

    status: int
    body: bytes
    again: str


class Transport(Protocol):
    async def post(
        self, url: str, body: Sequence[bytes], headers: Mapping[str, str], ttl_s: float
    ) -> Answer:
        """Send an encode request; cancelling the call cancels the work there.

        Args:
            url: of the encoder.
            body: the request's, in pieces.
            ttl_s: until the answer has to be here.

        Raises:
            UnavailableError: the encoder cannot be reached.
            EncoderLostError: it went away before it had answered.
            DeadlineError: no answer within `ttl_s`.
        """

    async def close(self) -> None:
        """Let go of connections."""


def written(pieces: Sequence[bytes]) -> Iterator[memoryview]:
    """A body bit by bit, each to be sent when there is room for it."""
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, len(view), _WRITTEN_BYTES):
            yield view[at : at + _WRITTEN_BYTES]


def out_of_reach(url: str, why: str) -> UnavailableError:
    return UnavailableError(f"encoder {url} is out of reach ({why})")
