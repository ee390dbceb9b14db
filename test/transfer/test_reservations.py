from __future__ import annotations

import numpy as np
import pytest

from sglang_epd.transfer.blocks import TRANSITIONS, Block, BlockState
from sglang_epd.transfer.extents import ALIGNMENT
from sglang_epd.transfer.reservations import QUARANTINE_S, Reservations

PAGE = ALIGNMENT
READERS = 3


class Memory:
    """What reservations ask of the world: counters of readers, and who lives."""

    def __init__(self, pages: int = 4, slots: int = 8) -> None:
        self.counts = np.zeros((slots, READERS), np.uint32)
        self.dead: set[str] = set()
        # What is known of the others: nothing, or True where they are seen to live.
        self.seen: bool | None = None
        self.reservations = Reservations(
            pages * PAGE,
            slots,
            READERS,
            drops=lambda which: self.counts[which],
            reset=self.reset,
            writer_lives=lambda process: False if process in self.dead else self.seen,
        )

    def reset(self, slot: int) -> None:
        self.counts[slot] = 0

    def shared(self, nbytes: int = PAGE, process: str = "encoder") -> Block:
        block = self.reservations.grant(nbytes)
        assert block is not None
        block.ticket, block.landing, block.writer = "t", "shared", process
        return block

    def filled(self, nbytes: int = PAGE) -> Block:
        block = self.reservations.grant(nbytes)
        assert block is not None
        self.reservations.fill(block)
        return block


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.mark.parametrize("before", BlockState)
@pytest.mark.parametrize("after", BlockState)
def test_only_the_transitions_of_the_table_are_possible(before, after):
    block = Block(1, 0, 1, 0, state=before)
    if after in TRANSITIONS[before]:
        block.move(after)
        assert block.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.value} to {after.value}"):
            block.move(after)
        assert block.state is before


def test_nothing_comes_back_from_the_final_state():
    assert set(TRANSITIONS) == set(BlockState)
    assert not TRANSITIONS[BlockState.FREE]


def test_there_are_as_many_blocks_as_slots():
    memory = Memory(pages=4, slots=2)
    first, _ = memory.reservations.grant(1), memory.reservations.grant(1)
    assert memory.reservations.grant(1) is None
    memory.reservations.free(first)
    assert memory.reservations.grant(1) is not None


def test_what_is_freed_is_news(memory):
    before = memory.reservations.freed
    memory.reservations.free(memory.reservations.grant(1))
    assert memory.reservations.freed > before


def test_memory_of_an_encoder_that_is_seen_to_live_is_kept_for_as_long_as_it_does(memory):
    memory.seen = True
    block = memory.shared()
    memory.reservations.revoke(block, 0.0)
    memory.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.QUARANTINED
    memory.dead.add(block.writer)
    memory.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.FREE


def test_an_encoder_without_a_name_is_given_the_whole_time(memory):
    block = memory.shared(process="")
    memory.dead.add("")
    memory.reservations.revoke(block, 0.0)
    memory.reservations.reclaim(QUARANTINE_S - 1)
    assert block.state is BlockState.QUARANTINED


def test_nobody_ends_the_quarantine_of_anothers_grant(memory):
    """Grants are numbered: whoever knows no ticket could name all of them."""
    block = memory.shared()
    memory.reservations.revoke(block, 0.0)
    memory.reservations.settle_late(block.grant, "another")
    memory.reservations.settle_late(block.grant + 1, "t")
    assert block.state is BlockState.QUARANTINED


def test_a_live_grant_is_not_ended_by_a_late_word(memory):
    block = memory.shared()
    memory.reservations.settle_late(block.grant, "t")
    assert block.state is BlockState.GRANTED


def test_a_block_that_somebody_else_may_be_handed_stays(memory):
    block = memory.filled()
    memory.reservations.hand(block, 0, 1)
    memory.counts[block.slot, 0] += 1
    memory.reservations.reclaim(0.0)
    assert block.state is BlockState.HANDED
    memory.reservations.hand(block, 0, 1)
    memory.reservations.close(block)
    memory.reservations.reclaim(0.0)
    assert block.state is BlockState.HANDED, "the second reading is still to be dropped"
    memory.counts[block.slot, 0] += 1
    memory.reservations.reclaim(0.0)
    assert block.state is BlockState.FREE


@pytest.mark.parametrize("twice", ["free", "fill", "revoke"])
def test_nothing_happens_to_a_block_twice(memory, twice):
    block = memory.shared()
    act = {
        "free": memory.reservations.free,
        "fill": memory.reservations.fill,
        "revoke": lambda block: memory.reservations.revoke(block, 0.0),
    }[twice]
    act(block)
    with pytest.raises(AssertionError, match="cannot go"):
        act(block)


def test_books_that_do_not_add_up_are_noticed(memory):
    block = memory.shared()
    block.state = BlockState.QUARANTINED
    with pytest.raises(AssertionError):
        memory.reservations.check_integrity()
