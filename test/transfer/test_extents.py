from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from integrity import check_extents
from sglang_epd.transfer.extents import ALIGNMENT, Extents, aligned

PAGES = 16


class ExtentsMachine(RuleBasedStateMachine):
    """Random takes and gives, beside a list of which page belongs to whom."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(PAGES * ALIGNMENT)
        self.pages: list[int | None] = [None] * PAGES
        self.taken: list[int] = []

    def fits(self, wanted: int, begin: int, end: int) -> bool:
        return any(
            all(owner is None for owner in self.pages[at : at + wanted])
            for at in range(begin, end - wanted + 1)
        )

    @rule(
        nbytes=st.integers(1, PAGES * ALIGNMENT + 1),
        high=st.booleans(),
        within=st.none() | st.tuples(st.integers(0, PAGES), st.integers(0, PAGES)),
    )
    def take(self, nbytes, high, within):
        begin, end = within or (0, PAGES)
        wanted = aligned(nbytes) // ALIGNMENT
        place = None if within is None else (begin * ALIGNMENT, end * ALIGNMENT)
        offset = self.extents.take(nbytes, high=high, within=place)
        assert (offset is not None) == self.fits(wanted, begin, end)
        if offset is None:
            return
        at, rest = divmod(offset, ALIGNMENT)
        assert not rest
        assert begin <= at <= at + wanted <= end
        assert self.pages[at : at + wanted] == [None] * wanted
        beyond = (at + 1, end) if high else (begin, at + wanted - 1)
        assert not self.fits(wanted, *beyond), "it is the outermost place"
        self.pages[at : at + wanted] = [offset] * wanted
        self.taken.append(offset)

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0))
    def give(self, index):
        offset = self.taken.pop(index % len(self.taken))
        self.extents.give(offset)
        self.pages = [None if owner == offset else owner for owner in self.pages]

    @invariant()
    def the_books_add_up(self):
        check_extents(self.extents)
        used = sum(owner is not None for owner in self.pages)
        assert self.extents.taken_bytes == used * ALIGNMENT

    def teardown(self):
        for offset in self.taken:
            self.extents.give(offset)
        check_extents(self.extents)
        assert self.extents.take(PAGES * ALIGNMENT) == 0, "all of it is one piece again"


TestExtentsMachine = ExtentsMachine.TestCase
TestExtentsMachine.settings = settings(
    max_examples=settings.default.max_examples * 3 // 5, stateful_step_count=30, deadline=None
)


@given(st.integers(0, 1 << 40))
def test_alignment_rounds_up_by_less_than_a_page(nbytes):
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT


def test_a_size_that_is_no_multiple_is_rounded_down():
    extents = Extents(2 * ALIGNMENT - 1)
    assert extents.size == ALIGNMENT
    assert extents.take(ALIGNMENT + 1) is None


def test_nothing_fits_into_nothing():
    extents = Extents(0)
    assert extents.take(1) is None
    check_extents(extents)


@pytest.mark.parametrize("offset", [0, ALIGNMENT, -1, 12345])
def test_what_was_not_taken_or_was_given_back_cannot_be_given_back(offset):
    extents = Extents(4 * ALIGNMENT)
    extents.give(extents.take(1))
    with pytest.raises(AssertionError, match="nothing was taken"):
        extents.give(offset)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda extents: extents._taken.popitem(), "bytes are missing|gap"),
        (lambda extents: extents._free.append((0, ALIGNMENT)), "gap or overlap"),
        (lambda extents: extents._free.clear(), "missing at the end"),
    ],
)
def test_books_that_do_not_add_up_are_noticed(damage, complaint):
    extents = Extents(4 * ALIGNMENT)
    extents.take(1)
    damage(extents)
    with pytest.raises(AssertionError, match=complaint):
        check_extents(extents)
