"""Embeddings to a server's ranks on other hosts, which cannot map the arena.

All ranks that run a request together see its outcome in the same tick. The rank that leads
then sends each item's bytes, and those of other hosts receive them into memory of their own.
One broadcast follows another in the order of requests and items, on all of them, so that none
meets another's. The other ranks of the receiver's host take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sglang_epd.errors import EncodeError, from_code
from sglang_epd.transfer.arena import ReceivedItem
from sglang_epd.wire.messages import Settled, TensorSpec

# The rank that leads, in the world.
_LEADER = 0

# Reads the items of a claim; raises the claim's error, or one of reading.
Receive = Callable[[Settled], list[ReceivedItem]]


class RelayError(Exception):
    """The ranks cannot go on together: this scheduler is to end, and its server with it."""


class Relay:
    """One rank's end; every rank of the group makes the same calls in the same order.

    Args:
        group: gloo's, of the rank that leads and all ranks of other hosts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def share(self, secret: bytes) -> bytes:
        """The leading rank's secret; the others give one of the same length."""
        shared = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        with _together():
            self._broadcast(shared)
        return bytes(shared.numpy())

    def sending(self, receive: Receive) -> Receive:
        """For the leading rank: as `receive`, and the others have the same items."""

        def receive_and_send(settled: Settled) -> list[ReceivedItem]:
            items: list[ReceivedItem] | None = None
            try:
                items = receive(settled)
            finally:
                # An outcome that is a failure says so to all ranks by itself.
                if not settled.code:
                    self._send(items)
            return items

        return receive_and_send

    def receive(self, settled: Settled) -> list[ReceivedItem]:
        """For the others: the items of a claim, in this process's memory.

        Raises:
            EpdError: the claim failed, or the leading rank could not read its items.
            RelayError: the leading rank is gone, or there is no memory.
        """
        if settled.code:
            raise from_code(settled.code, settled.message)
        with _together():
            was_read = torch.empty(1, dtype=torch.uint8)
            self._broadcast(was_read)
            if was_read.item():
                return [
                    ReceivedItem(item.key, item.layout, self._rows(item.layout.embedding))
                    for item in settled.items
                    if item is not None
                ]
        raise EncodeError("the host that received the request's media could not read them")

    def _send(self, items: list[ReceivedItem] | None) -> None:
        with _together():
            self._broadcast(torch.tensor([items is not None], dtype=torch.uint8))
            for item in items or ():
                self._broadcast(item.embedding)

    def _rows(self, spec: TensorSpec) -> torch.Tensor:
        rows = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self._broadcast(rows)
        return rows

    def _broadcast(self, data: torch.Tensor) -> None:
        """Bytes, whatever the dtype: gloo knows not all of them."""
        dist.broadcast(data.view(torch.uint8), src=_LEADER, group=self._group)


@contextmanager
def _together() -> Iterator[None]:
    """A failure on one rank, of which the others cannot hear, ends it."""
    try:
        yield
    except RuntimeError as error:
        raise RelayError(f"embeddings do not reach all hosts of this server: {error}") from error
