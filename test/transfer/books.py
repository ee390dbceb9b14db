"""A ledger with memory that is not there, and everything that it asks of the world."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_epd.tally import Tally
from sglang_epd.transfer.blocks import Block, BlockState
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.ledger import Ledger
from sglang_epd.transfer.reservations import Reservations
from sglang_epd.wire import messages as wire

PAGE = ALIGNMENT
PAGES = 8
SLOTS = 16
READERS = 3
GRANT_TTL_S = 3.0
ROWS = 4
LAYOUT = wire.Layout("IMAGE", wire.TensorSpec("float32", (ROWS, 4)), [[1, 4, 4]])
# Connections of the control channel.
SCHEDULER, TOKENIZER = b"scheduler", b"tokenizer"


def key(letter: str) -> bytes:
    return letter.encode() * 32


def offer(
    ticket: str = "t", item: int = 0, letter: str = "k", pages: int = 1, **more: Any
) -> wire.Offer:
    return wire.Offer(ticket, item, key(letter), LAYOUT, pages * PAGE, **more)


class Books:
    """A ledger, readers that drop what they are told to, and encoders that live or do not.

    Attributes:
        dead: encoders' processes that are seen to be gone.
        seen: what is known of the others: nothing, or True where they are seen to live.
    """

    def __init__(self, pages: int = PAGES, kept_pages: int = 0, slots: int = SLOTS) -> None:
        self.drops = np.zeros((slots, READERS), np.uint32)
        self.dead: set[str] = set()
        self.seen: bool | None = None
        self.reservations = Reservations(
            pages * PAGE,
            slots,
            READERS,
            drops=lambda slots: self.drops[slots],
            reset=self._reset,
            writer_lives=lambda process: False if process in self.dead else self.seen,
            kept_bytes=kept_pages * PAGE,
        )
        self.tally = Tally()
        self.ledger = Ledger(self.reservations, GRANT_TTL_S, self.tally)
        self._messages: dict[bytes, list[wire.Message]] = {SCHEDULER: [], TOKENIZER: []}

    def _reset(self, slot: int) -> None:
        self.drops[slot] = 0

    def _told(self, peer: bytes) -> list[Any]:
        for to, message in self.ledger.take_messages():
            self._messages[to].append(message)
        told, self._messages[peer] = self._messages[peer], []
        return told

    def needed(self) -> list[wire.Needed]:
        """What the tokenizer was told since the last time."""
        return self._told(TOKENIZER)

    def outcomes(self) -> list[wire.Settled | wire.AskPrefix]:
        """What the scheduler was told since the last time."""
        return self._told(SCHEDULER)

    def settled(self) -> list[tuple[wire.Landed | None, ...]]:
        """Items of the claims that have settled since the last time, all of them well."""
        outcomes: list[wire.Settled] = self._told(SCHEDULER)
        assert not any(outcome.code for outcome in outcomes), outcomes
        return [outcome.items for outcome in outcomes]

    def expect(
        self,
        ticket: str = "t",
        letters: str = "?",
        ttl_s: float = 10.0,
        *,
        laid: bool = False,
        waits: bool = False,
    ) -> wire.Expect:
        """Announce a request; "?" is an item whose key is not known.

        Args:
            laid: whether the layouts of its items are told.
            waits: whether the tokenizer keeps it until an item has landed.
        """
        keys = tuple(b"" if letter == "?" else key(letter) for letter in letters)
        layouts = (LAYOUT,) * len(keys) if laid else ()
        message = wire.Expect(ticket, len(keys), ttl_s, keys, layouts, waits=waits)
        self.ledger.expect(message, 0.0, watcher=TOKENIZER)
        return message

    def claim(
        self,
        expect: wire.Expect,
        name: str = "c",
        covered: tuple[int, ...] = (),
        *,
        prefix: bool = False,
        now: float = 0.0,
    ) -> None:
        message = wire.Claim(name, expect, 0, READERS, covered, prefix)
        self.ledger.claim(SCHEDULER, message, now)

    def grant(
        self, *about: Any, landing: str = "inline", peer: bytes | None = None, **more: Any
    ) -> Block:
        """The block that an offer gets, of which `offer` has the arguments.

        Args:
            peer: the encoder's connection.
        """
        block = self.ledger.offer(offer(*about, **more), 0.0, landing=landing, peer=peer)
        assert isinstance(block, Block), block
        return block

    def begin(self, block: Block, rows: int) -> None:
        """The first rows of a block come."""
        ticket, item, grant = block.name
        nbytes = rows * block.nbytes // ROWS
        self.ledger.begin(wire.Payload(ticket, item, grant, nbytes, last=False))

    def fill(self, block: Block) -> None:
        assert self.ledger.fill(wire.Payload(*block.name), 0.0)

    def deliver(self, *about: Any, **more: Any) -> Block:
        block = self.grant(*about, **more)
        self.fill(block)
        return block

    def drop(self, *items: wire.Landed) -> None:
        """Every reader drops these, and the receiver looks after them."""
        for item in items:
            self.drops[item.slot] += 1
        self.reservations.reclaim(0.0)

    @property
    def blocks(self) -> list[Block]:
        return [block for some in self.reservations._blocks.values() for block in some.values()]

    @property
    def kept(self) -> str:
        """The keys of what is kept and not in use."""
        kept = (block for block in self.blocks if block.state is BlockState.KEPT)
        return "".join(sorted(chr(block.offer.key[0]) for block in kept))
