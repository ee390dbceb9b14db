from __future__ import annotations

from contextlib import ExitStack

import pytest

from sglang_epd.encoder.admission import Admission
from sglang_epd.errors import (
    DuplicateError,
    MediaTooLargeError,
    OverloadedError,
)

MIB = 1 << 20


@pytest.fixture
def admission() -> Admission:
    return Admission(max_items=4, max_bytes=2 * MIB)


def test_items_of_all_requests_count_together(admission):
    admission.admit("a", 3)
    with pytest.raises(OverloadedError, match="3 items in work, at most 4"):
        admission.admit("b", 2)
    admission.check()
    admission.admit("c", 1)
    with pytest.raises(OverloadedError):
        admission.check()
    assert (admission.items, admission.live) == (4, 2)
    admission.leave("a")
    admission.admit("b", 2)
    assert (admission.items, admission.live) == (3, 2)


def test_a_refused_request_leaves_nothing(admission):
    admission.admit("a", 1)
    with pytest.raises(DuplicateError, match="a"):
        admission.admit("a", 1)
    with pytest.raises(MediaTooLargeError, match="5 items for one encoder, which takes 4"):
        admission.admit("b", 5)
    with pytest.raises(OverloadedError):
        admission.admit("b", 4)
    assert (admission.items, admission.live) == (1, 1)
    admission.leave("a")
    admission.admit("b", 4)


def test_requests_of_many_items_leave_room_for_those_of_few():
    admission = Admission(max_items=1024, max_bytes=MIB)
    for number in range(12):
        admission.admit(f"large {number}", 64)
    with pytest.raises(OverloadedError, match="768 items in work, at most 768"):
        admission.admit("one more", 64)
    for number in range(16):
        admission.admit(f"small {number}", 16)
    with pytest.raises(OverloadedError, match="at most 1024"):
        admission.admit("another", 1)
    alone = Admission(max_items=64, max_bytes=MIB)
    alone.admit("all", 64)
    assert alone.items == 64


def test_bytes_are_bounded(admission):
    admission.take_bytes(MIB)
    admission.take_bytes(MIB)
    with pytest.raises(OverloadedError, match="2 MiB of media in work, at most 2"):
        admission.take_bytes(1)
    assert admission.nbytes == 2 * MIB
    admission.nbytes -= MIB
    admission.take_bytes(MIB)


@pytest.mark.parametrize("parts", [1, 3], ids=["at once", "in parts"])
def test_an_only_body_may_be_over_the_bound(admission, parts):
    """Of a chunked body nobody says in advance how long it is."""
    for own in range(parts):
        admission.take_bytes(3 * MIB // parts, own * 3 * MIB // parts)
    with pytest.raises(OverloadedError):
        admission.take_bytes(1)


def test_bytes_that_were_fetched_count_over_the_bound_too(admission):
    admission.nbytes += 3 * MIB
    with pytest.raises(OverloadedError):
        admission.take_bytes(0)
    admission.nbytes -= 3 * MIB
    admission.take_bytes(MIB)


def test_items_that_are_fetched_leave_a_quarter_to_others(admission):
    admission.admit("slow", 2, urls=2)
    with pytest.raises(OverloadedError, match="2 items being fetched, at most 3"):
        admission.admit("slow too", 2, urls=2)
    admission.admit("slow as well", 1, urls=1)
    admission.admit("inline", 1)
    assert (admission.items, admission.fetching) == (4, 3)


def test_a_request_of_several_urls_leaves_as_many_places_to_others():
    admission = Admission(max_items=16, max_bytes=MIB)  # of which 12 are fetched
    admission.admit("large", 4, urls=4)
    admission.admit("larger", 4, urls=4)
    with pytest.raises(OverloadedError, match="8 items being fetched, at most 12"):
        admission.admit("too large", 4, urls=4)
    for n in range(4):
        admission.admit(f"small {n}", 1, urls=1)
    with pytest.raises(OverloadedError, match="12 items being fetched, at most 12"):
        admission.admit("one more", 1, urls=1)


def test_items_that_have_ended_leave_before_their_request(admission):
    admission.admit("a", 4)
    admission.note_ended("a")
    admission.admit("b", 1)
    assert admission.items == 4
    admission.leave("a")
    assert admission.items == 1


def test_items_that_are_here_are_fetched_no_more(admission):
    admission.admit("a", 3, urls=3)
    admission.note_fetched("a")
    admission.admit("b", 1, urls=1)
    assert (admission.items, admission.fetching) == (4, 3)
    admission.leave("a")
    assert (admission.items, admission.fetching) == (1, 1)
    admission.leave("b")
    assert (admission.items, admission.fetching) == (0, 0)


def test_items_that_wait_for_memory_are_not_in_work(admission):
    admission.admit("a", 4)
    with admission.awaiting_memory("a"):
        admission.admit("b", 1)
        assert (admission.items, admission.waiting) == (4, 1)
    assert (admission.items, admission.waiting) == (5, 0)  # its receiver has memory for it
    admission.leave("a")
    assert (admission.items, admission.waiting) == (1, 0)


def test_so_many_items_wait_and_no_more(admission):
    with ExitStack() as waiting:
        for n in range(8):
            admission.admit(f"{n}", 4)
            for _ in range(4):
                waiting.enter_context(admission.awaiting_memory(f"{n}"))
        admission.admit("more", 1)
        with pytest.raises(OverloadedError, match="32 items wait"):
            waiting.enter_context(admission.awaiting_memory("more"))
        assert (admission.items, admission.waiting) == (1, 32)


def test_items_that_wait_for_memory_leave_a_quarter_of_the_bytes_to_others(admission):
    admission.admit("a", 1)
    admission.take_bytes(MIB * 3 // 2)
    with admission.awaiting_memory("a"):
        pass
    admission.take_bytes(1)
    with pytest.raises(OverloadedError, match="1 MiB of media in work"):
        admission.awaiting_memory("a").__enter__()
    assert (admission.items, admission.waiting) == (1, 0)


def test_one_request_has_no_more_urls_than_may_ever_be_fetched(admission):
    with pytest.raises(MediaTooLargeError, match="4 URLs for one encoder, which fetches 3"):
        admission.admit("a", 4, urls=4)
    admission.admit("b", 4, urls=3)
