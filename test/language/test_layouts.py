from __future__ import annotations

import threading

import pytest

from clocks import Clock
from sglang_epd.errors import DeadlineError, MediaError
from sglang_epd.language import layouts
from sglang_epd.language.layouts import Board
from sglang_epd.wire.http import ErrorReply, LayoutReply, decode_body

TTL_S = 100.0


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def board(clock):
    return Board(clock)


def read(board: Board, room: int) -> LayoutReply | None:
    slot = board.look(room)
    assert slot is not None and slot.settled
    return None if slot.body is None else decode_body(slot.body, LayoutReply, 1 << 20)


def test_a_room_is_unheard_of_then_open_then_known(board, described):
    assert board.look(7) is None
    slot = board.open(7, TTL_S)
    assert not board.look(7).settled
    slot.learnt([described("a"), described("b")])
    for _ in range(2):
        assert read(board, 7) == LayoutReply([described("a"), described("b")])


def test_a_failure_keeps_its_class_and_message(board):
    board.open(7, TTL_S).failed(MediaError("image 1 of 1: HTTP 404"))
    assert read(board, 7) == LayoutReply(error=ErrorReply("MediaError", "image 1 of 1: HTTP 404"))


def test_one_unknown_layout_makes_all_unknown(board, described):
    board.open(7, TTL_S).learnt([described(), None])
    assert read(board, 7) is None


def test_the_first_answer_stays(board, described):
    slot = board.open(7, TTL_S)
    slot.learnt([described()])
    slot.failed(DeadlineError("cancelled after it was done"))
    assert read(board, 7).error is None


def test_a_room_that_is_used_again_belongs_to_the_later_request(board, described):
    first, second = board.open(7, TTL_S), board.open(7, TTL_S)
    first.learnt([described("a")])
    assert not board.look(7).settled
    second.learnt([described("b")])
    assert read(board, 7).items == [described("b")]
    assert len(board._slots) == 1


def test_what_is_known_is_kept_for_a_minute_and_the_rest_until_its_deadline(
    board, clock, described
):
    board.open(7, 1.0).learnt([described()])
    board.open(8, TTL_S)
    clock.now += 59
    assert board.look(7)
    clock.now += 2
    assert board.look(7) is None
    clock.now += TTL_S - 61
    assert board.look(8)
    clock.now += layouts._GRACE_S + 1
    board.open(9, TTL_S)
    assert len(board._slots) == 1


def test_what_is_known_stays_as_long_as_its_request_may_take(board, clock, described):
    """The prompt before it in a batch may be a long video."""
    board.open(7, TTL_S).learnt([described()])
    clock.now += TTL_S
    assert read(board, 7).items


def test_rooms_are_bounded_in_number(clock, described):
    board = Board(clock, max_rooms=3)
    for room in range(5):
        board.open(room, TTL_S).learnt([described()])
    assert len(board._slots) == 3
    assert [board.look(room) is not None for room in range(5)] == [False, False, True, True, True]


def test_what_was_refused_takes_no_room_from_what_is_waited_for(board, clock):
    """One request may have as many rooms as it has prompts."""
    board = Board(clock, max_rooms=3)
    board.open(1, TTL_S)
    for room in range(10, 20):
        board.open(room, TTL_S).failed(MediaError("refused"))
    assert not board.look(1).settled
    assert len(board._slots) == 3


def test_what_nobody_settles_goes_at_its_time_beside_what_is_settled(clock, described):
    """The rooms of prompts without media, say."""
    board = Board(clock, max_rooms=100)
    for room in range(50):
        board.open(room, TTL_S)
    clock.now += TTL_S
    board.open(50, TTL_S).learnt([described()])
    clock.now += layouts._GRACE_S + 1
    board.open(51, TTL_S)
    assert [*board._slots] == [50, 51]


def test_rooms_are_bounded_in_bytes(clock, described):
    board = Board(clock, max_bytes=4000)
    for room in range(100):
        board.open(room, TTL_S).learnt([described()] * 4)
    assert 1 < len(board._slots) < 20
    assert 0 < board._bytes <= 4000
    for room in range(100):
        board.open(room, TTL_S)
    assert board._bytes == 0


def test_watchers_are_called_for_their_room_and_forgotten(board, described):
    called = []
    with board.watched(7, lambda: called.append("it")):
        board.open(8, TTL_S).learnt([described()])
        assert not called
        slot = board.open(7, TTL_S)
        assert called == ["it"]
        slot.learnt([described()])
        slot.failed(MediaError("twice"))
        assert called == ["it"] * 2
    board.open(7, TTL_S)
    assert called == ["it"] * 2
    assert not board._watchers


def test_threads_may_write_and_read_at_once(described):
    board = Board(max_rooms=64)
    wrong = []

    def work(thread: int) -> None:
        try:
            for n in range(300):
                room = (thread * 300 + n) % 100
                with board.watched(room, lambda: None):
                    board.open(room, TTL_S).learnt([described()])
                    board.look(room)
        except Exception as error:  # it would be lost with the thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert board._bytes == sum(len(slot.body) for slot in board._slots.values())
