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


def test_blocks_do_not_overlap_and_numbers_are_not_used_again(memory):
    blocks = [memory.reservations.grant(PAGE - 1) for _ in range(4)]
    assert sorted(block.offset for block in blocks) == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert len({block.slot for block in blocks}) == 4
    assert memory.reservations.grant(1) is None
    memory.reservations.free(blocks[2])
    again = memory.reservations.grant(1)
    assert again.offset == blocks[2].offset
    assert again.grant not in {block.grant for block in blocks}
    memory.reservations.check_integrity()


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


def test_a_revoked_grant_of_a_payload_on_the_channel_is_free_at_once(memory):
    block = memory.reservations.grant(PAGE)
    memory.reservations.revoke(block, 0.0)
    assert memory.reservations.held_bytes == 0
    assert memory.reservations.quarantined == 0


def test_memory_that_an_encoder_may_write_to_is_not_reused(memory):
    block = memory.shared(nbytes=4 * PAGE)
    memory.reservations.revoke(block, 10.0)
    assert memory.reservations.quarantined == 1
    memory.reservations.reclaim(10.0 + QUARANTINE_S - 0.1)
    assert memory.reservations.grant(1) is None
    memory.reservations.check_integrity()
    memory.reservations.reclaim(10.0 + QUARANTINE_S)
    assert (memory.reservations.quarantined, memory.reservations.held_bytes) == (0, 0)


def test_memory_of_an_encoder_that_is_seen_to_live_is_kept_for_as_long_as_it_does(memory):
    memory.seen = True
    block = memory.shared()
    memory.reservations.revoke(block, 0.0)
    memory.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.QUARANTINED
    memory.dead.add(block.writer)
    memory.reservations.reclaim(100 * QUARANTINE_S)
    assert block.state is BlockState.FREE


def test_quarantine_ends_when_the_encoder_is_gone(memory):
    one, other = memory.shared(process="one"), memory.shared(process="other")
    for block in (one, other):
        memory.reservations.revoke(block, 0.0)
    memory.dead.add("one")
    memory.reservations.reclaim(0.0)
    assert one.state is BlockState.FREE
    assert other.state is BlockState.QUARANTINED


def test_an_encoder_without_a_name_is_given_the_whole_time(memory):
    block = memory.shared(process="")
    memory.dead.add("")
    memory.reservations.revoke(block, 0.0)
    memory.reservations.reclaim(QUARANTINE_S - 1)
    assert block.state is BlockState.QUARANTINED


def test_quarantine_ends_when_the_encoder_says_that_it_is_done(memory):
    block = memory.shared()
    memory.reservations.revoke(block, 0.0)
    memory.reservations.settle_late(block.grant, "t")
    assert memory.reservations.held_bytes == 0
    memory.reservations.settle_late(block.grant, "t")  # said twice
    memory.reservations.check_integrity()


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


def test_a_block_is_free_when_each_of_its_readers_has_dropped_it(memory):
    block = memory.filled()
    memory.reservations.hand(block, 1, 2)
    memory.reservations.close(block)
    for reader in (1, 2):
        memory.reservations.reclaim(0.0)
        assert block.state is BlockState.HANDED
        memory.counts[block.slot, reader] += 1
    memory.reservations.reclaim(0.0)
    assert block.state is BlockState.FREE


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


def test_a_block_that_nobody_was_handed_is_free_when_it_is_closed(memory):
    block = memory.filled()
    memory.reservations.close(block)
    assert memory.reservations.held_bytes == 0


def test_a_slot_counts_from_nothing_when_it_is_used_again():
    memory = Memory(slots=1)
    for _ in range(3):
        block = memory.filled()
        memory.reservations.hand(block, 0, 1)
        memory.reservations.close(block)
        memory.reservations.reclaim(0.0)
        assert block.state is BlockState.HANDED
        memory.counts[block.slot, 0] += 1
        memory.reservations.reclaim(0.0)
        assert block.state is BlockState.FREE
    assert len(memory.reservations) == 0


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
