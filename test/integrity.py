"""Books that have to add up, after every step of a test that changes them.

Each raises AssertionError where they do not.
"""

from __future__ import annotations

from typing import Any

from sglang_epd.cache.embeddings import EmbeddingCache
from sglang_epd.transfer.blocks import BlockState
from sglang_epd.transfer.entries import ItemState, Plan
from sglang_epd.transfer.extents import Extents, aligned
from sglang_epd.transfer.ledger import _MAX_ENDED, Ledger
from sglang_epd.transfer.reservations import Reservations


def check_cache(cache: EmbeddingCache) -> None:
    held = [*cache._entries.values(), *cache._dropped]
    sizes: dict[object, int] = {}
    for entry in held:
        memory = entry.embedding.untyped_storage()
        shared = memory.nbytes() > entry.nbytes
        sizes[memory.data_ptr() if shared else entry] = memory.nbytes()
    assert cache._bytes == sum(sizes.values())
    assert cache._idle_bytes == sum(entry.nbytes for entry in cache._idle.values())
    assert all(entry.pins > 0 for entry in cache._dropped)
    assert cache._idle.keys() == {key for key, e in cache._entries.items() if not e.pins}
    assert all(key == entry.key for key, entry in cache._entries.items())
    assert not cache._idle or cache._bytes <= cache.capacity_bytes


def check_extents(extents: Extents) -> None:
    """Free and taken ranges tile the arena."""
    ranges = [*extents._free, *((at, at + size) for at, size in extents._taken.items())]
    position = 0
    for begin, end in sorted(ranges):
        assert begin == position, f"gap or overlap at {position}"
        assert end > begin, "empty range"
        position = end
    assert position == extents.size, "bytes are missing at the end"
    for (_, end), (begin, _) in zip(extents._free, extents._free[1:], strict=False):
        assert end < begin, "free neighbours were not joined"


def check_reservations(reservations: Reservations) -> None:
    check_extents(reservations.extents)
    by_state = reservations._blocks
    blocks = [block for some in by_state.values() for block in some.values()]
    kept = list(by_state[BlockState.KEPT].values())
    assert reservations.extents.taken_bytes == sum(aligned(block.nbytes) for block in blocks)
    assert reservations.kept_bytes == sum(aligned(block.nbytes) for block in kept)
    assert reservations.kept_bytes <= reservations._most_kept_bytes
    slots = [block.slot for block in blocks]
    assert len(set(slots)) == len(slots), "two blocks share a slot"
    assert not set(slots) & set(reservations._slots), "a slot is both used and free"
    for state, some in by_state.items():
        assert all(block.state is state for block in some.values()), "a block in a wrong list"
    assert not by_state[BlockState.FREE], "a free block is listed"
    assert all(reservations._findable(block) and block.closed for block in kept)
    findable = reservations._by_key.values()
    assert all(block in blocks for block in findable), "a block that is gone can be found"


def claimed(ledger: Ledger) -> int:
    """Claims that wait for items."""
    return sum(entry.claim is not None for entry in ledger._entries.values())


def check_ledger(ledger: Ledger) -> None:
    check_reservations(ledger.reservations)
    relying = {
        (ticket, number)
        for ticket, entry in ledger._entries.items()
        for number, item in enumerate(entry.items)
        if item.state is ItemState.CACHED
    }
    listed = [pair for pairs in ledger._relying.values() for pair in pairs]
    assert relying == set(listed), "lost count of who relies on the cache"
    assert len(listed) == len(set(listed)), "an item relies on two keys"
    assert all(ledger._relying.values()), "a key that nobody relies on is listed"
    assert all(ledger.reservations.find(key) for key in ledger._relying), "relied on what is gone"
    blocks = set()
    for ticket, entry in ledger._entries.items():
        assert ticket not in ledger._ended, "an open ticket is also ended"
        assert entry.plan is not Plan.ASKING or entry.claim is None, "it claimed before its answer"
        patient = entry.plan in (Plan.GATHERING, Plan.ASKING)
        assert patient or not entry.patient_until, "offers wait for a plan that is decided"
        for item in entry.items:
            holds = item.state in (ItemState.GRANTED, ItemState.RECEIVED)
            assert (item.block is not None) == holds, "a block in a wrong state"
            if item.block is not None:
                assert item.block.grant not in blocks, "two items hold one block"
                blocks.add(item.block.grant)
        if entry.claim is not None:
            assert not entry.satisfies(entry.claim[1]), "a complete request is still waited for"
            assert entry.error is None, "a failed request is still waited for"
    assert len(ledger._ended) <= _MAX_ENDED


def check_gate(gate: Any) -> None:
    """Of a `language.prefix` gate: no match is held for a request that is gone."""
    live = {*gate._queue.waiting(), *gate._parked}
    assert set(gate._locks) <= live, "a match is held for nobody"
