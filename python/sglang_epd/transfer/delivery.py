"""How an embedding leaves an encoder: offered, granted, delivered.

`sender` implements it for language servers of this package, `encoder.sglang_rpc` for SGLang's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_epd.wire import messages as wire

if TYPE_CHECKING:
    import torch
    import zmq.asyncio


class GrantLostError(Exception):
    """The grant is void (it expired, another encoder has the item, or the connection
    broke): offer again."""


@dataclass
class Granted:
    """A grant, until when it may be used (`time.monotonic`), and for how many bytes.

    Attributes:
        used: whether something else will tell the receiver what became of it.
        way, sent: how the payload's beginning went, and its bytes.
        socket: by which.
    """

    message: wire.Grant
    until: float
    nbytes: int
    used: bool = False
    way: str = ""
    sent: int = 0
    socket: zmq.asyncio.Socket | None = None

    def over(self) -> bool:
        """Whether nothing is written under it, nor will be."""
        return not self.used and time.monotonic() >= self.until


class Offered:
    """An offer that was made.

    Attributes:
        answered: done when the receiver has said anything; the result is whether the
            offer has to wait for memory.
        decided: the grant or the decline.
    """

    def __init__(self, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.nbytes = nbytes
        self.answered: asyncio.Future[bool] = loop.create_future()
        self.decided: asyncio.Future[Granted | wire.Decline] = loop.create_future()

    @property
    def granted(self) -> Granted | None:
        """The grant, if one has come."""
        if not self.decided.done() or self.decided.cancelled() or self.decided.exception():
            return None
        decision = self.decided.result()
        return decision if isinstance(decision, Granted) else None

    @property
    def waits(self) -> bool:
        """Whether the receiver has no memory for it, as far as is known."""
        return self.answered.done() and not self.decided.done()

    def answer(self, message: wire.Grant | wire.Decline | wire.Wait) -> None:
        if not self.answered.done():
            self.answered.set_result(isinstance(message, wire.Wait))
        if self.decided.done() or isinstance(message, wire.Wait):
            return
        if isinstance(message, wire.Grant):
            until = time.monotonic() + message.ttl_s
            self.decided.set_result(Granted(message, until, self.nbytes))
        else:
            self.decided.set_result(message)

    def fail(self, error: Exception) -> None:
        for future in (self.answered, self.decided):
            if not future.done():
                future.set_exception(error)
                future.exception()  # it need not be asked for


class Delivery(Protocol):
    """How embeddings leave: a `Sender`, or whatever is in its place."""

    def offer(self, endpoint: str, offer: wire.Offer) -> AbstractAsyncContextManager[Offered]: ...

    async def begin(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, rows: int, timeout_s: float
    ) -> None: ...

    async def deliver(
        self, endpoint: str, granted: Granted, embedding: torch.Tensor, timeout_s: float
    ) -> str: ...
